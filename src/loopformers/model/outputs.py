"""What forward calls return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput

from loopformers.model.cache import LoopedCache
from loopformers.recurrence.record import LoopDiagnostics

__all__ = ["LoopedCausalLMOutput", "LoopedModelOutput"]


@dataclass
class LoopedModelOutput(ModelOutput):
    """Output of LoopedModel.

    Attributes:
        last_hidden_state: After the final norm, (batch, seq, dim).
        cache: The cache, when one is in use.
        hidden_states: The core's inputs and every loop's state, on request.
        attentions: Weights of each layer application, in order, on request.
        loop_states: State after each loop, (batch, seq, dim) each, on request.
        residual_norms: Mean over tokens of the L2 norm of the residual stream before each loop's closing norm, (loops,).
        loop_diagnostics: Residual norms, state cosines and gradient norms by loop, on request.
    """

    last_hidden_state: Tensor | None = None
    cache: LoopedCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    loop_states: tuple[Tensor, ...] | None = None
    residual_norms: Tensor | None = None
    loop_diagnostics: LoopDiagnostics | None = None


@dataclass
class LoopedCausalLMOutput(CausalLMOutputWithPast):
    """transformers' CausalLMOutputWithPast, and what loops add to it.

    Attributes:
        loop_states: State after each loop, (batch, seq, dim) each, on request.
        residual_norms: Mean over tokens of the L2 norm of the residual stream before each loop's closing norm, (loops,).
        loop_diagnostics: Residual norms, state cosines and gradient norms by loop, on request.
        loss_parts: Terms of the objective by name, scalars without gradient, in training mode.
        exit_loops: Loops that each token got under an exit rule, (batch, seq), 0 for padding.
    """

    loop_states: tuple[Tensor, ...] | None = None
    residual_norms: Tensor | None = None
    loop_diagnostics: LoopDiagnostics | None = None
    loss_parts: dict[str, Tensor] | None = None
    exit_loops: Tensor | None = None
