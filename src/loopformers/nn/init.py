"""Initialisers of both papers, and of the modulation, addressed by the role that a matrix plays.

A role is marked on the matrix itself where it is built. transformers initialises module by module and passes over those
that own no parameters, so a block can't initialise its children: each matrix must know.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import nn
from transformers import initialization as init

from loopformers.nn.head import draw_rows

__all__ = ["INIT_SCHEMES", "MODULATION_INITS", "InitScheme", "ModulationInit", "Role", "as_role", "initialize"]

InitScheme = Literal["flt", "loopformer"]
INIT_SCHEMES: tuple[str, ...] = get_args(InitScheme)

ModulationInit = Literal["zero", "normal", "open"]
MODULATION_INITS: tuple[str, ...] = get_args(ModulationInit)

Role = Literal["input", "output", "head", "embedder", "modulation", "identity"]
"""What a matrix is: a projection from the stream or back into it, the head, a part of the conditioning, or a map of the
stream onto itself that starts as the identity."""


def as_role(role: Role, linear: nn.Linear) -> nn.Linear:
    """Mark the role of a matrix and return it. Without a mark it is an input projection."""
    linear.init_role = role  # type: ignore[assignment]
    return linear


def initialize(
    module: nn.Module, *, scheme: InitScheme, modulation: ModulationInit, std: float, num_layers: int, head_std: float
) -> None:
    """Initialise one module; called once for each module of a model.

    Args:
        module: The module; those that own no weights are left alone.
        scheme: `flt`: embedding N(0, 1), head N(0, 0.001), input projections uniform of standard deviation
            1/sqrt(fan_in), output projections zero. `loopformer`: N(0, std), output projections N(0, std / sqrt(2 N)).
        modulation: `zero`: weights and biases 0, so gates are shut and a loop starts as the identity (the LoopFormer
            paper). `normal`: N(0, std) with zero biases (its released code). `open`: weights 0, gates 1 and scales 0, so
            a loop starts as the unconditioned layer; the one that works beside zero output projections.
        std: Standard deviation of `loopformer`'s matrices and of the conditioning.
        num_layers: N, unique layers of the looped stack.
        head_std: Standard deviation of an untied head.
    """
    match module:
        case nn.Embedding():
            draw_rows(module, std=1.0 if scheme == "flt" else std)
        case nn.RMSNorm() if module.weight is not None:
            init.ones_(module.weight)
        case nn.Linear():
            if module.bias is not None:
                init.zeros_(module.bias)
            match getattr(module, "init_role", "input"):
                case "head":
                    draw_rows(module, std=head_std)
                case "embedder":
                    init.normal_(module.weight, std=std)
                case "modulation":
                    _initialize_modulation(module, modulation, std)
                case "identity":
                    init.eye_(module.weight)
                case role:
                    _initialize_projection(module, role == "output", scheme, std, num_layers)
        case _:
            pass


def _initialize_projection(linear: nn.Linear, is_output: bool, scheme: InitScheme, std: float, num_layers: int) -> None:
    if scheme == "loopformer":
        init.normal_(linear.weight, std=std / math.sqrt(2 * num_layers) if is_output else std)
    elif is_output:
        init.zeros_(linear.weight)
    else:
        bound = math.sqrt(3 / linear.in_features)  # uniform on [-b, b] has standard deviation b / sqrt(3)
        init.uniform_(linear.weight, -bound, bound)


def _initialize_modulation(linear: nn.Linear, kind: ModulationInit, std: float) -> None:
    if kind == "normal":
        init.normal_(linear.weight, std=std)
        return
    init.zeros_(linear.weight)
    # A slice does not carry the mark of a loaded parameter, so look for it on the whole.
    if kind == "open" and not getattr(linear.bias, "_is_hf_initialized", False):
        init.ones_(linear.bias[: linear.out_features // 2])  # the gates come first: g_a, g_m, s_a, s_m
