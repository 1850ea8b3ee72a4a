"""The logit lens: what the head makes of each loop's state, and after which loop a prediction stands."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["LensCell", "LensToken", "depth_needed", "read_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LensCell:
    """What one loop would answer at one position."""

    token_ids: tuple[int, ...]
    """Likeliest first."""
    probabilities: tuple[float, ...]
    """Theirs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LensToken:
    """What all loops would answer at one position."""

    input_id: int
    """The token that the model is given there."""
    target_id: int
    """The token that comes next."""
    depth_needed: int
    """Loop from which on the answer stays, counted from 1."""
    loops: tuple[LensCell, ...]


def depth_needed(predictions: Tensor) -> Tensor:
    """Return the loop, counted from 1, from which on every loop predicts what the last one does.

    `min {t : argmax z_s = argmax z_M for all s from t to M}`, z the logits of a loop.

    Args:
        predictions: Likeliest token by loop, (loops, ...).

    Returns:
        Whole numbers from 1 to M, (...).
    """
    agrees = (predictions == predictions[-1]).long()
    stays = agrees.flip(0).cumprod(dim=0).sum(dim=0)  # loops at the end that agree without a break
    return len(predictions) - stays + 1


def read_tokens(logits: Tensor, input_ids: Tensor, target_ids: Tensor, *, top: int = 3) -> list[LensToken]:
    """Return what every loop would answer at each position of one sequence.

    Args:
        logits: Of every loop, (loops, positions, vocab).
        input_ids: (positions,).
        target_ids: (positions,).
        top: Tokens a cell.
    """
    best = logits.float().softmax(dim=-1).topk(top, dim=-1)
    depths = depth_needed(best.indices[..., 0])
    return [
        LensToken(
            input_id=int(input_ids[i]),
            target_id=int(target_ids[i]),
            depth_needed=int(depths[i]),
            loops=tuple(
                LensCell(
                    token_ids=tuple(best.indices[loop, i].tolist()), probabilities=tuple(best.values[loop, i].tolist())
                )
                for loop in range(len(logits))
            ),
        )
        for i in range(logits.shape[1])
    ]
