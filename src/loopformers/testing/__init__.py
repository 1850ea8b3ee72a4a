"""Public helpers for tests of looped models: tiny models whose loops really differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["tiny_config", "tiny_model"]


def tiny_config(preset: str, **overrides: Any) -> LoopConfig:
    """Return a preset at a size that runs in milliseconds, with odd and distinct sizes where that is legal."""
    from loopformers.model.config import LoopConfig

    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "max_position_embeddings": 40,
    }
    if preset != "base":
        sizes["num_loops"] = 3
    return LoopConfig.from_preset(preset, **{**sizes, **overrides})


def tiny_model(preset: str, *, seed: int = 0, randomize: bool = True, **overrides: Any) -> LoopedForCausalLM:
    """Return a tiny model in evaluation mode.

    Args:
        preset: Name of a system.
        seed: Seed of the weights.
        randomize: Draw all weights anew, large enough that every loop changes the state and every gate is open. Freshly
            initialised models are nearly the same at every loop count (output projections are zero), and a test that
            compares loops would pass whatever the loops do.
        overrides: Configuration fields.
    """
    import torch

    from loopformers.model.modeling import LoopedForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LoopedForCausalLM(tiny_config(preset, **overrides)).eval()
        if randomize:
            torch.manual_seed(seed)  # so that the weights do not depend on what the initialiser has drawn
            rows = {id(module.weight): module.drawn_rows for module in model.modules() if hasattr(module, "drawn_rows")}
            with torch.no_grad():
                for parameter in model.parameters():
                    fan_in = parameter.shape[-1]
                    drawn = parameter.new_empty(rows.get(id(parameter), len(parameter)), *parameter.shape[1:])
                    drawn.normal_(std=1.2 / fan_in**0.5 if parameter.dim() > 1 else 0.5)
                    parameter.copy_(drawn[: len(parameter)])
    return model
