"""The optimisers of both papers, as settings that build a `torch.optim.Optimizer` for a model.

`MuonAdamW` is the one of the fully looped transformer (arXiv 2605.18797), `DecayedAdamW` the one of LoopFormer
(arXiv 2602.11451). Every trainable parameter lands in exactly one group, and each group carries its `name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loopformers.errors import ConfigError
from loopformers.training.muon import Muon

__all__ = [
    "CompositeOptimizer",
    "DecayedAdamW",
    "MuonAdamW",
    "OptimizerSettings",
    "flt_parameter_groups",
    "muon_momentum",
]

REFERENCE_WIDTH = 768
"""Width d at which embedding and head rates apply unscaled; elsewhere they are multiplied by sqrt(768 / d)."""

LAYER_STACKS = ("layers", "prelude", "coda")
"""Names of the module lists whose matrices Muon updates."""

NOT_LAYER_MATRICES = ("modulation", "conditioning")
"""Modules inside or beside layers whose matrices are no layer matrices: they start at zero and are read by AdamW."""


def muon_momentum(step: int, *, start: float = 0.85, end: float = 0.95, num_steps: int = 300) -> float:
    """Momentum at an update, 0-based: linear from `start` to `end` over `num_steps` updates, then constant."""
    share = min(step / num_steps, 1.0)
    return (1 - share) * start + share * end


def flt_parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Sort the trainable parameters of a causal language model.

    Returns:
        `matrices`: weights of attention and MLP in the layers; `embedding`: the token embedding, and the head when it
        is the same matrix; `head`; `other`: conditioning, modulation, norms, biases and learned positions. A
        shared parameter appears once; groups without a parameter are left out.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "embedding": [], "head": [], "other": []}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        path = name.split(".")
        if p is embeddings.weight:
            groups["embedding"].append(p)
        elif head is not None and p is head.weight:
            groups["head"].append(p)
        elif p.ndim == 2 and any(part in LAYER_STACKS for part in path) and not set(path) & set(NOT_LAYER_MATRICES):
            groups["matrices"].append(p)
        else:
            groups["other"].append(p)
    return {name: parameters for name, parameters in groups.items() if parameters}


class CompositeOptimizer(torch.optim.Optimizer):
    """Several optimisers over different parameters, used as one.

    The `param_groups` are the parts' own dicts and the `state` is shared with them, so learning-rate schedulers,
    accelerate and `state_dict` see one ordinary optimiser. A `momentum_ramp` sets the momentum of every group that
    holds `steps_done` before each update; the count travels with the group in the state dict.

    Args:
        parts: The optimisers; their parameters must not overlap.
        momentum_ramp: Momentum as a function of the number of updates done.

    Raises:
        ConfigError: No parts, or a group is added after construction.
    """

    def __init__(
        self, parts: Sequence[torch.optim.Optimizer], *, momentum_ramp: Callable[[int], float] | None = None
    ) -> None:
        if not parts:
            raise ConfigError("a composite of 0 optimisers updates nothing; the model has no trainable parameter")
        self.parts = list(parts)
        self.momentum_ramp = momentum_ramp
        self._complete = False
        super().__init__([group for part in parts for group in part.param_groups], defaults={})
        self._complete = True
        self._share()

    def _share(self) -> None:
        """Make the parts hold this optimiser's group dicts and state."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # load_state_dict ends here, with new dicts
        self._share()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("parts", "momentum_ramp", "_complete")}
        return {**super().__getstate__(), **own}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after construction: only the parts know how to update it."""
        if self._complete:
            raise ConfigError(
                "a composite optimiser takes no further parameter group; build it again with all parameters"
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if self.momentum_ramp is not None and "steps_done" in group:
                group["momentum"] = self.momentum_ramp(group["steps_done"])
                group["steps_done"] += 1
        for part in self.parts:
            part.step()
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonAdamW:
    """Muon for layer matrices and AdamW for the rest, without decay (arXiv 2605.18797, released recipe).

    Matrices: Nesterov momentum 0.85 -> 0.95 over 300 updates, five Newton-Schulz steps, update scaled by
    sqrt(max(1, rows / cols)). AdamW: betas (0.8, 0.95), eps 1e-10. A head tied to the embedding is updated once, at the
    embedding's rate.
    """

    matrix_lr: float = 0.02
    """Rate of layer matrices."""
    embedding_lr: float = 0.2
    """Rate of the token embedding at width 768; scaled by sqrt(768 / d)."""
    head_lr: float = 0.004
    """Rate of the head at width 768; scaled by sqrt(768 / d)."""
    other_lr: float = 1e-3
    """Rate of conditioning, modulation, norms, biases and learned positions, which the released FLT does not have."""

    def __post_init__(self) -> None:
        for name in ("matrix_lr", "embedding_lr", "head_lr", "other_lr"):
            check_rate(name, getattr(self, name))

    def build(self, model: nn.Module) -> CompositeOptimizer:
        """Return the optimiser for a causal language model."""
        groups = flt_parameter_groups(model)
        width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
        scale = math.sqrt(REFERENCE_WIDTH / width)
        parts: list[torch.optim.Optimizer] = []
        if matrices := groups.pop("matrices", None):
            group = {"params": matrices, "name": "matrices", "steps_done": 0}
            parts.append(
                Muon(
                    [group],
                    lr=self.matrix_lr,
                    weight_decay=0.0,
                    momentum=muon_momentum(0),
                    nesterov=True,
                    ns_steps=5,
                    adjust_lr_fn="original",
                )
            )
        if groups:
            rates = {"embedding": self.embedding_lr * scale, "head": self.head_lr * scale, "other": self.other_lr}
            parts.append(
                torch.optim.AdamW(
                    [{"params": params, "name": name, "lr": rates[name]} for name, params in groups.items()],
                    betas=(0.8, 0.95),
                    eps=1e-10,
                    weight_decay=0.0,
                )
            )
        return CompositeOptimizer(parts, momentum_ramp=muon_momentum)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayedAdamW:
    """AdamW with betas (0.9, 0.95) and decay on matrices only (arXiv 2602.11451, released recipe).

    Matrices are all parameters of two axes or more, embeddings among them; gains and biases are not decayed.
    """

    lr: float = 6e-4
    """Rate of all parameters."""
    weight_decay: float = 0.2
    """Decoupled decay of matrices."""

    def __post_init__(self) -> None:
        check_rate("lr", self.lr)
        check_rate("weight_decay", self.weight_decay)

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Return the optimiser for any module."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        named = {"matrices": [p for p in trainable if p.ndim >= 2], "other": [p for p in trainable if p.ndim < 2]}
        decay = {"matrices": self.weight_decay, "other": 0.0}
        groups = [{"params": ps, "name": name, "weight_decay": decay[name]} for name, ps in named.items() if ps]
        if not groups:
            raise ConfigError("the model has no trainable parameter; unfreeze one")
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))


OptimizerSettings = MuonAdamW | DecayedAdamW
"""Any optimiser of this module."""


def check_rate(name: str, value: float) -> None:
    """Raise ConfigError unless a rate is a finite number of at least 0."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name}={value!r} must be a finite number of at least 0")
