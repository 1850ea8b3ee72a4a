"""Initialisers of both papers, and of the modulation, addressed by the part that a matrix plays."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch import nn
from transformers import initialization as init

from loopformers.nn.attention import Attention
from loopformers.nn.conditioning import Conditioning, Embedder
from loopformers.nn.mlp import MLP

__all__ = ["INIT_SCHEMES", "MODULATION_INITS", "InitScheme", "ModulationInit", "initialize"]

InitScheme = Literal["flt", "loopformer"]
INIT_SCHEMES: tuple[str, ...] = get_args(InitScheme)

ModulationInit = Literal["zero", "normal", "open"]
MODULATION_INITS: tuple[str, ...] = get_args(ModulationInit)


def initialize(
    module: nn.Module, *, scheme: InitScheme, modulation: ModulationInit, std: float, num_layers: int, head_std: float
) -> None:
    """Initialise one module; called once for each module of a model, children first.

    Args:
        module: The module; those that own no weights of ours are left alone.
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
        case Attention() | MLP():
            for name, linear in module.named_children():
                _initialize_projection(linear, name in ("o_proj", "down_proj"), scheme, std, num_layers)
        case Conditioning():
            for linear in module.modulation:
                _initialize_modulation(linear, modulation, std)
        case Embedder():
            for linear in module.children():
                if isinstance(linear, nn.Linear):
                    init.normal_(linear.weight, std=std)
                    init.zeros_(linear.bias)
        case nn.Embedding():
            init.normal_(module.weight, std=1.0 if scheme == "flt" else std)
        case nn.RMSNorm() if module.weight is not None:
            init.ones_(module.weight)
        case nn.Linear() if getattr(module, "is_head", False):
            init.normal_(module.weight, std=head_std)
        case _:
            pass


def _initialize_projection(linear: nn.Module, is_output: bool, scheme: InitScheme, std: float, num_layers: int) -> None:
    if not isinstance(linear, nn.Linear):
        return
    if scheme == "loopformer":
        init.normal_(linear.weight, std=std / math.sqrt(2 * num_layers) if is_output else std)
    elif is_output:
        init.zeros_(linear.weight)
    else:
        bound = math.sqrt(3 / linear.in_features)  # uniform on [-b, b] has standard deviation b / sqrt(3)
        init.uniform_(linear.weight, -bound, bound)


def _initialize_modulation(linear: nn.Module, kind: ModulationInit, std: float) -> None:
    assert isinstance(linear, nn.Linear)
    if kind == "normal":
        init.normal_(linear.weight, std=std)
        init.zeros_(linear.bias)
        return
    init.zeros_(linear.weight)
    init.zeros_(linear.bias)
    if kind == "open":
        gates = linear.out_features // 2  # the gates come first: g_a, g_m, s_a, s_m
        if not getattr(linear.bias, "_is_hf_initialized", False):
            init.ones_(linear.bias.data[:gates])
