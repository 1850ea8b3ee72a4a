"""How fast this machine is: its matrix products, and a step of a given model as a share of them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from loopformers.errors import ConfigError
from loopformers.model.memory_check import free_bytes
from loopformers.model.modeling import LoopedForCausalLM
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig
    from loopformers.training.memory import Microbatch
    from loopformers.training.optimizers import OptimizerSettings

__all__ = ["Calibration", "available_bytes", "calibrate", "device_of", "matmul_peak", "stated"]

SHORTEST = 16
"""Fewest tokens of a window that a step is timed with."""

ASSUMED_SHARE = 0.3
"""Share of the peak that a step is taken to reach when the size of the timed one is chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Speed of one process's device."""

    device: str
    """What was measured, or that the numbers were stated."""
    peak_flops: float
    """Operations a second of a large matrix product, in the run's precision."""
    efficiency: float
    """Share of the peak that forward and backward pass reach, in operations that are really made."""
    update_seconds: float | None
    """Time of the optimiser's update; None: not measured, so its operations count at the same speed."""
    windows: int = 0
    """Windows of the timed step; 0: none was timed."""
    seq_len: int = 0
    """Tokens in each."""

    @property
    def flops_per_second(self) -> float:
        """Operations a second of forward and backward pass."""
        return self.peak_flops * self.efficiency


def device_of() -> torch.device:
    """Return the device that training would use."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stated(peak_flops: float | None, efficiency: float, *, precision: str) -> Calibration:
    """Return a calibration of given numbers; the peak is measured where it is not given.

    Raises:
        ConfigError: An efficiency outside (0, 1], or a peak that is not positive.
    """
    if not 0 < efficiency <= 1:
        raise ConfigError(
            f"efficiency={efficiency} must lie above 0 and at most at 1: the share of the peak that is reached"
        )
    if peak_flops is not None and not 0 < peak_flops < float("inf"):
        raise ConfigError(f"peak_flops={peak_flops} must be a positive number of operations a second")
    device = device_of()
    return Calibration(
        device="stated" if peak_flops is not None else f"{device.type}, efficiency stated",
        peak_flops=matmul_peak(device, precision) if peak_flops is None else peak_flops,
        efficiency=efficiency,
        update_seconds=None,
    )


def matmul_peak(device: torch.device, precision: str, *, size: int | None = None, repeats: int = 3) -> float:
    """Return operations a second of the fastest of a few square matrix products.

    Args:
        device: Where.
        precision: float32 or bfloat16.
        size: Rows; default 1024 on a CPU (256 in bfloat16, which most CPUs emulate), 8192 elsewhere.
        repeats: Products, after one to warm up.
    """
    on_cpu = 256 if precision == "bfloat16" else 1024
    size = size or (on_cpu if device.type == "cpu" else 8192)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with torch.no_grad():
        a = torch.full((size, size), 0.5, dtype=dtype, device=device)
        times = [_seconds(lambda: a @ a, device) for _ in range(repeats + 1)]
    return 2.0 * size**3 / min(times[1:])


def calibrate(
    config: LoopConfig,
    batch: Microbatch,
    optimizer: OptimizerSettings,
    executed_flops: Callable[[Microbatch], float],
    *,
    limit_seconds: float = 4.0,
) -> Calibration:
    """Time one step of this very model, after one to warm up, on as much of a microbatch as the limit allows.

    The random state, the default device and existing models are left alone.

    Args:
        config: The model.
        batch: A microbatch of the run; fewer windows, then shorter ones, where it is too much.
        optimizer: Optimiser settings.
        executed_flops: Operations that forward and backward pass of a microbatch really make.
        limit_seconds: What one forward and backward pass should take at most.

    Raises:
        ConfigError: Weights, gradients and optimiser state do not fit into the memory that is free.
    """
    device = device_of()
    needed = config.num_parameters() * 4 * 4
    free = available_bytes(device)
    if needed > free:
        raise ConfigError(
            f"timing a step needs {needed / 2**30:.1f} GiB for weights, gradients and optimiser state, and {free / 2**30:.1f} "
            f"GiB are free on {device.type}; state the speed instead: --efficiency 0.4, and --peak-tflops for another device"
        )
    peak = matmul_peak(device, batch.precision)
    affordable = limit_seconds * peak * ASSUMED_SHARE
    while executed_flops(batch) > affordable and (batch.windows > 1 or batch.seq_len >= 2 * SHORTEST):
        if batch.windows > 1:
            batch = dataclasses.replace(batch, windows=batch.windows // 2)
        else:
            batch = dataclasses.replace(batch, seq_len=batch.seq_len // 2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LoopedForCausalLM(config).to(device).train()
        model.loss_chunk_tokens = batch.loss_chunk_tokens
        model.model.num_kept_loops = batch.mode.kept_loops
        if batch.mode.checkpointing:
            _enable_checkpointing(model)
        ids = torch.randint(config.vocab_size, (batch.windows, batch.seq_len)).to(device)
        updates = optimizer.build(model)
        given: dict[str, Any] = {} if batch.num_grad_loops is None else {"num_grad_loops": batch.num_grad_loops}
        if config.objective == "shortcut_consistency":
            given["short_schedule"] = Schedule.uniform(max(1, config.num_loops - 1))

        def forward_and_backward() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=batch.precision == "bfloat16"):
                loss = _loss(model, ids, given)
            loss.backward()

        passes = [_seconds(forward_and_backward, device), 0.0]
        first_update = _seconds(updates.step, device)
        updates.zero_grad()
        passes[1] = _seconds(forward_and_backward, device)
        update = min(first_update, _seconds(updates.step, device))
    reached = executed_flops(batch) / min(passes)
    peak = max(peak, reached)  # emulated products are the faster the smaller they are
    return Calibration(
        device=_device_name(device),
        peak_flops=peak,
        efficiency=reached / peak,
        update_seconds=update,
        windows=batch.windows,
        seq_len=batch.seq_len,
    )


def available_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_bytes()


def _loss(model: LoopedForCausalLM, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """A function of its own, so that its logits are gone before the backward pass, as in training."""
    loss: torch.Tensor = model(ids, labels=ids, **given).loss
    return loss


def _enable_checkpointing(model: LoopedForCausalLM) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} of {os.cpu_count()} threads"
