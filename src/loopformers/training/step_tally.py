"""What one update did, summed over microbatches and ranks with one collective and read with one host sync."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loopformers.recurrence.record import LoopDiagnostics

__all__ = ["StepNumbers", "StepTally", "layer_of"]

WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.)")
"""Names that wrappers put into a parameter's path."""

STACKED = ("prelude", "layers", "coda")
"""Module lists whose members are layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNumbers:
    """What one update did, over all microbatches and ranks; norms are L2 and before clipping."""

    loss: float
    """Objective."""
    loss_parts: dict[str, float]
    """Its terms by name."""
    gradient_norm: float
    """Of all parameters."""
    layer_gradient_norms: dict[str, float]
    """Of the parameters of each layer, by the layer's name."""
    loop_gradient_norms: list[float]
    """Of the loss by each loop's output, the residual stream after its last layer."""
    residual_norms: list[float]
    """Mean over tokens of the residual stream's norm before each loop's closing norm."""
    state_cosines: list[float]
    """Mean over tokens of the cosine between a loop's state and the one before, from the second loop on."""


class StepTally:
    """Collects tensors during an update and reads them once, after its last backward pass.

    Args:
        world_size: Ranks that train together.
        reduce_sum: Sums a vector over ranks; a collective, not called on one rank.
        microbatches_add_up: Whether a microbatch's loss parts are sums over the step's count of targets, so that they add
            up; otherwise they are means.
        ranks_add_up: Whether that count is of all ranks.
    """

    def __init__(
        self,
        *,
        world_size: int,
        reduce_sum: Callable[[Tensor], Tensor],
        microbatches_add_up: bool,
        ranks_add_up: bool,
    ) -> None:
        self.world_size, self.reduce_sum = world_size, reduce_sum
        self.microbatches_add_up, self.ranks_add_up = microbatches_add_up, ranks_add_up
        self._layers: tuple[list[str], Tensor, Tensor] | None = None
        self._key: tuple[int, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        self._losses: list[Tensor] = []
        self._parts: list[Mapping[str, Tensor]] = []
        self._diagnostics: list[LoopDiagnostics] = []

    def add_outputs(self, outputs: Any) -> None:
        """Keep what the forward pass of a microbatch reports, where it does."""
        if getattr(outputs, "loss_parts", None) is not None:
            self._parts.append(outputs.loss_parts)
        if getattr(outputs, "loop_diagnostics", None) is not None:
            self._diagnostics.append(outputs.loop_diagnostics)

    def add_loss(self, loss: Tensor) -> None:
        """Keep a microbatch's share of the objective; the shares of a step add up."""
        self._losses.append(loss)

    def read(self, model: nn.Module, *, gradient_scale: float = 1.0) -> StepNumbers:
        """Return the numbers of the update and forget it. Call it on every rank, when gradients are reduced.

        Args:
            model: Holds the gradients.
            gradient_scale: What a gradient scaler multiplied the loss by.
        """
        names, squares = self._gradient_squares(model)
        parts = list(self._parts[0]) if self._parts else []
        num_parts = max(1, len(self._parts))
        depths = [len(diagnostics.residual_norms) for diagnostics in self._diagnostics]
        deepest = max(depths, default=0)
        sections = [torch.stack(self._losses).sum()[None]]
        if parts:
            sections.append(torch.stack([torch.stack([p[name] for p in self._parts]).sum() for name in parts]))
        if deepest:
            sections += [
                _sum_padded([d.residual_norms for d in self._diagnostics], deepest),
                _sum_padded([d.state_cosines for d in self._diagnostics], deepest - 1),
                _sum_padded([_squared(d.gradient_norms) for d in self._diagnostics], deepest),
            ]
        sections.append(squares)
        device = squares.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        vector = torch.cat([section.to(device, wide, non_blocking=True) for section in sections])
        if self.world_size > 1:
            vector = self.reduce_sum(vector)
        values: list[float] = vector.tolist()  # the one host sync of a step
        self.clear()

        def take(count: int) -> list[float]:
            taken, values[:count] = values[:count], []
            return taken

        ran = [self.world_size * sum(depth > loop for depth in depths) for loop in range(deepest)]
        part_scale = (
            1.0 / (1 if self.microbatches_add_up else num_parts) / (1 if self.ranks_add_up else self.world_size)
        )
        loss = take(1)[0] / self.world_size
        loss_parts = {name: value * part_scale for name, value in zip(parts, take(len(parts)), strict=True)}
        residuals = [value / count for value, count in zip(take(deepest), ran, strict=True)]
        cosines = [value / count for value, count in zip(take(max(0, deepest - 1)), ran[1:], strict=True)]
        # The objective is the mean over ranks of theirs, so each rank's activations have its gradient / ranks.
        loop_gradients = [_root(value) / (self.world_size * gradient_scale) for value in take(deepest)]
        layers = dict(zip(names, take(len(names)), strict=True))
        return StepNumbers(
            loss=loss,
            loss_parts=loss_parts,
            gradient_norm=_root(sum(layers.values())) / gradient_scale,
            layer_gradient_norms={name: _root(value) / gradient_scale for name, value in layers.items()},
            loop_gradient_norms=loop_gradients,
            residual_norms=residuals,
            state_cosines=cosines,
        )

    def _gradient_squares(self, model: nn.Module) -> tuple[list[str], Tensor]:
        """Return the layers' names and this rank's part of the sums of their squared gradients, (layers,)."""
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not named:
            return [], torch.zeros(0)
        gradients = [gradient for _, gradient in named]
        key = (len(gradients), *(id(p) for p in model.parameters() if p.grad is not None))
        if self._layers is None or key != self._key:  # which parameters train hardly ever changes
            layers = [layer_of(name) for name, _ in named]
            distinct = list(dict.fromkeys(layers))
            device = gradients[0].device
            index = torch.tensor([distinct.index(layer) for layer in layers], device=device)
            # Every rank adds its gradients: a replica counts for its share alone.
            shares = torch.tensor([1.0 / self._replicas(gradient) for gradient in gradients], device=device)
            self._layers, self._key = (distinct, index, shares), key
        distinct, index, shares = self._layers
        norms = torch.stack(torch._foreach_norm([local_part(gradient) for gradient in gradients]))
        squares = _squared(norms)
        return distinct, torch.zeros(len(distinct), dtype=squares.dtype, device=squares.device).index_add_(
            0, index, squares * shares.to(squares.dtype)
        )

    def _replicas(self, gradient: Tensor) -> int:
        if not hasattr(gradient, "placements"):
            return self.world_size
        sizes = zip(gradient.device_mesh.shape, gradient.placements, strict=True)  # type: ignore[attr-defined]
        return math.prod(size for size, placement in sizes if placement.is_replicate())


def layer_of(parameter: str) -> str:
    """Return the layer that a parameter belongs to.

    Example:
        >>> layer_of("module.model.layers.2.mlp.up_proj.weight"), layer_of("model.embed_tokens.weight")
        ('layers.2', 'embed_tokens')
    """
    path = WRAPPERS.sub(r"\1", parameter).replace("..", ".").strip(".").split(".")
    for stack in STACKED:
        if stack in path[:-1]:
            at = path.index(stack)
            return ".".join(path[at : at + 2])
    return path[1] if path[0] == "model" and len(path) > 1 else path[0]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a sharded tensor that lives on this rank, and a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined, unused-ignore]


def _squared(norms: Tensor) -> Tensor:
    """Square in the widest dtype of the device: a norm of 1e20 is no infinity."""
    return (norms if norms.device.type == "mps" else norms.double()).square()


def _sum_padded(rows: Sequence[Tensor], length: int) -> Tensor:
    """Sum vectors of unequal lengths, each filled up with zeros; microbatches may run different numbers of loops."""
    if all(len(row) == length for row in rows):
        return torch.stack([row.detach() for row in rows]).sum(0)
    total = rows[0].new_zeros(length, dtype=torch.float32 if rows[0].device.type == "mps" else torch.float64)
    for row in rows:
        total[: len(row)] += row.detach()
    return total


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
