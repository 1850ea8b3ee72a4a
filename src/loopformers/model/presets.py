"""Presets: every system of both papers as a row of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loopformers.errors import ConfigError, unknown_name
from loopformers.extensions import load_extensions
from loopformers.limits import MAX_WIDTH

__all__ = ["PRESETS", "preset_fields"]

_FLT: dict[str, Any] = {
    # FLT Small (arXiv 2605.18797): d = 64 N, heads of 128, a vocabulary that gives the 127 M parameters it states.
    "vocab_size": 151936,
    "pad_vocab_size_multiple": 64,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_loops": 12,
    "max_position_embeddings": 1024,
    "position_embedding": "rotary",
    "rope_table_dtype": "bfloat16",
    "qk_norm": True,
    "hidden_act": "relu2",
    "learned_norms": "none",
    "loop_norm": True,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 15.0,
    "init_scheme": "flt",
    "objective": "last_loop",
}

_LOOPFORMER: dict[str, Any] = {
    # LoopFormer 3 x 8 (arXiv 2602.11451): 278,169,600 parameters.
    "vocab_size": 50304,
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_loops": 8,
    "max_position_embeddings": 1024,
    "position_embedding": "learned",
    "qk_norm": False,
    "hidden_act": "gelu",
    "learned_norms": "final",
    "loop_norm": False,
    "tie_word_embeddings": True,
    "init_scheme": "loopformer",
    "stream": "state",
    "injection": "none",
    "objective": "last_loop",
}

_BASE = _LOOPFORMER | {"learned_norms": "all"}
_TMLT = _LOOPFORMER | {"conditioning": "loop_index", "modulation_init": "zero"}
_SHORTCUT = {"objective": "shortcut_consistency"}
_ELASTIC = _SHORTCUT | {"conditioning": "time_and_step", "modulation_init": "open"}

PRESETS: dict[str, Mapping[str, Any]] = {
    "lt": _FLT | {"stream": "state", "injection": "none"},
    "lt-input": _FLT | {"stream": "inputs_plus_state", "injection": "none"},
    "lt-query": _FLT | {"stream": "inputs", "injection": "query_first"},
    "flt-residual": _FLT | {"stream": "inputs", "injection": "residual_all"},
    "flt": _FLT | {"stream": "inputs", "injection": "query_all"},
    "lt-balanced": _FLT | {"stream": "balanced", "injection": "none"},
    "lt-adapter": _FLT | {"stream": "adapter", "injection": "none"},
    "base": _BASE | {"num_hidden_layers": 24, "num_loops": 1},
    "base-loop": _BASE,
    "base-loop-exit": _BASE | _SHORTCUT,
    "tmlt": _TMLT,
    "tmlt-exit": _TMLT | _SHORTCUT,
    "loopformer": _LOOPFORMER | _SHORTCUT | {"conditioning": "time_and_step", "modulation_init": "zero"},
    "elastic-flt": _FLT | _ELASTIC | {"stream": "inputs", "injection": "query_all"},
    "elastic-balanced": _FLT | {"stream": "balanced", "injection": "none", "objective": "every_loop"},
}
"""Field values by system. Everything that a row leaves out is LoopConfig's default."""


def preset_fields(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a preset with overrides; sizes that follow the width follow it still.

    Heads are of size 128 in the FLT family and 64 in the LoopFormer family, and LoopFormer's MLP is 2.5 times the width,
    unless `num_attention_heads` or `intermediate_size` says otherwise.

    Raises:
        ConfigError: No preset of that name.
    """
    load_extensions()
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(unknown_name("preset", name, PRESETS))
    fields = {**PRESETS[name], **overrides}
    is_flt = PRESETS[name]["init_scheme"] == "flt"
    width = fields["hidden_size"]
    if isinstance(width, int) and 0 < width <= MAX_WIDTH:  # LoopConfig refuses the others
        fields.setdefault("num_attention_heads", math.ceil(width / (128 if is_flt else 64)))
        fields.setdefault("intermediate_size", 4 * width if is_flt else math.ceil(2.5 * width))
    return fields
