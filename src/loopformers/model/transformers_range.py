"""What differs between the transformers releases that we support (5.0 and up). Nothing else looks at versions."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = ["CACHE_NAME"]

CACHE_NAME = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""Name under which generate() hands a cache to forward() and looks for it in its output."""
