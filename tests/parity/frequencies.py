"""The float32 frequencies that LoopFormer's goldens were computed with; another processor's may differ in the last bit."""

from __future__ import annotations

import math

import torch

ROUNDED_UP = (12, 106)
"""Frequencies that the goldens' processor gave one float32 above the nearest."""


def nearest_frequencies():
    exponents = -math.log(10000) * (torch.arange(128, dtype=torch.float32) / 128)
    return exponents.double().exp().float()


def goldens_frequencies(device):
    """Stand in for `loopformers.nn.conditioning.frequencies`."""
    table = nearest_frequencies()
    for k in ROUNDED_UP:
        table[k] = torch.nextafter(table[k], torch.tensor(2.0))
    return table.to(device)
