"""How training spends memory and time on a model: settings that change what a step costs, and what happens when one fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loopformers.errors import ConfigError

if TYPE_CHECKING:
    from loopformers.model.modeling import LoopedForCausalLM

__all__ = ["EngineSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of the engine. All but `num_grad_loops` and `skip_non_finite` leave every update as it is.

    Example:
        >>> EngineSettings(activation_checkpointing=True, num_kept_loops=2).num_kept_loops
        2
    """

    loss_chunk_tokens: int | None = None
    """Tokens whose logits are in memory at a time; None: as the model has it, by default all of a microbatch."""
    activation_checkpointing: bool = False
    """Whether each loop's activations are recomputed in the backward pass instead of kept."""
    num_kept_loops: int | None = None
    """Last loops that keep their activations under activation checkpointing; None: as the model has it, by default none."""
    num_grad_loops: int | None = None
    """Last loops that gradients flow through; None: all."""
    compile_layers: bool = False
    """Whether each layer is compiled, with the loop outside: no number of loops makes it compile again."""
    shard: bool = False
    """Whether parameters, gradients and optimiser states are divided over processes (FSDP2) instead of copied (DDP)."""
    reshard_after_forward: bool = True
    """Whether a divided layer lets its parameters go after each call; False gathers them once a forward pass."""
    skip_non_finite: bool = False
    """Whether an update whose loss or gradient is not finite is left out and counted, instead of ending the run."""
    diagnostics: bool = True
    """Whether loops are watched: residual norms, state cosines, gradients by loop and layer, and the verdict."""

    def __post_init__(self) -> None:
        for name, at_least in (("loss_chunk_tokens", 1), ("num_kept_loops", 0), ("num_grad_loops", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {at_least}, or None")
        if self.num_kept_loops and not self.activation_checkpointing:
            raise ConfigError(
                f"num_kept_loops={self.num_kept_loops} without activation_checkpointing keeps nothing that is not kept anyway; "
                "set activation_checkpointing=True, or leave it out"
            )

    def apply(self, model: LoopedForCausalLM) -> None:
        """Set a model up for training, on every process, before its optimiser is built."""
        if self.loss_chunk_tokens is not None:
            model.loss_chunk_tokens = self.loss_chunk_tokens
        if self.num_kept_loops is not None:
            model.model.num_kept_loops = self.num_kept_loops
        if self.activation_checkpointing:
            # The older of two names, which transformers 6 will drop and 5.0 needs.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        if self.compile_layers:
            from loopformers.training.compile import compile_layers

            compile_layers(model)
        if self.shard:
            from loopformers.training.sharding import shard_model

            shard_model(model, reshard_after_forward=self.reshard_after_forward)
