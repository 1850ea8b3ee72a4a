"""One pre-norm transformer layer, open to a recurrent signal and to modulation from outside."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from loopformers.nn.attention import Attention, AttentionContext, KeyValueSlot
from loopformers.nn.mlp import MLP

__all__ = ["Layer", "Modulation"]


class Modulation(NamedTuple):
    """Gates on the two residual branches and scales on their normed inputs, each broadcastable to (batch, seq, dim)."""

    attention_gate: Tensor
    mlp_gate: Tensor
    attention_scale: Tensor
    mlp_scale: Tensor


class Layer(nn.Module):
    """Pre-norm attention and MLP.

    With a recurrent signal h the query comes from it; with a modulation (g_a, g_m, s_a, s_m) inputs are scaled and
    branches gated:

        u = norm(x) (1 + s_a),  q_in = norm(h) (1 + s_a) if h is given else u
        x <- x + g_a W_o Attention(W_q q_in, W_k u, W_v u)
        x <- x + g_m MLP(norm(x) (1 + s_m))

    (FLT, arXiv 2605.18797, section 3; LoopFormer, arXiv 2602.11451, equation 3.)
    """

    def __init__(self, attention: Attention, mlp: MLP, attention_norm: nn.RMSNorm, mlp_norm: nn.RMSNorm) -> None:
        super().__init__()
        self.input_layernorm = attention_norm
        self.self_attn = attention
        self.post_attention_layernorm = mlp_norm
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        context: AttentionContext,
        signal: Tensor | None = None,
        modulation: Modulation | None = None,
        slot: KeyValueSlot | None = None,
    ) -> Tensor:
        """Return the stream after this layer.

        Args:
            x: Residual stream, (batch, seq, dim).
            context: What this call's layers share.
            signal: Recurrent signal that the query is made of, same shape as `x`; None: self-attention.
            modulation: Gates and scales of this loop; None: an ordinary layer.
            slot: Cache row of this layer in this loop, or None.
        """
        u = self.input_layernorm(x)
        source = u if signal is None else self.input_layernorm(signal)
        if modulation is None:
            x = x + self.self_attn(u, source, context, slot)
            return x + self.mlp(self.post_attention_layernorm(x))
        scaled = u * (1 + modulation.attention_scale)
        source = scaled if signal is None else source * (1 + modulation.attention_scale)
        x = x + modulation.attention_gate * self.self_attn(scaled, source, context, slot)
        return x + modulation.mlp_gate * self.mlp(self.post_attention_layernorm(x) * (1 + modulation.mlp_scale))
