"""How fast a run is: tokens per second, the share of the machine's peak that its operations reach, and the time left."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from loopformers.training.calibration import matmul_peak

__all__ = ["SPEED_FILE", "Speed", "Speedometer", "measured_peak"]

SPEED_FILE = "speed.jsonl"
"""Name of the log of speeds in a run's folder. Times differ from run to run, so they stand beside the log of updates, which
a resumed run continues to the bit."""

WINDOW = 20
"""Updates that a speed is the mean of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Over the last updates, all ranks together; time for evaluation and checkpoints is left out."""

    seconds: float
    """Of the last update, its data included."""
    tokens_per_second: float
    """Training tokens."""
    mfu: float
    """Operations of the objective, every loop and both trajectories, as a share of the peak of matrix products."""
    seconds_left: float
    """Until the last update, at the pace of this process so far, evaluation and checkpoints included."""


@functools.lru_cache(maxsize=8)
def measured_peak(device_type: str, precision: str, num_threads: int) -> float:
    """Return operations a second of a large matrix product on this process's device, measured once per process.

    Args:
        device_type: cpu, cuda, ..
        precision: float32 or bfloat16.
        num_threads: torch's; another number is another measurement.
    """
    return matmul_peak(torch.device(device_type), precision)


class Speedometer:
    """Times updates.

    Args:
        peak_flops: Operations a second that all ranks together could reach.
        num_steps: Updates of the run.
        clock: Seconds that only go up.
    """

    def __init__(self, *, peak_flops: float, num_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.peak_flops, self.num_steps, self.clock = peak_flops, num_steps, clock
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._started_at = self._began_at = clock()
        self._steps = 0

    def begin(self) -> None:
        """Note that the data of an update are about to be fetched."""
        self._began_at = self.clock()

    def end(self, *, step: int, tokens: int, flops: float) -> Speed:
        """Note that an update was made.

        Args:
            step: Updates done.
            tokens: Tokens of this update, all ranks.
            flops: Operations of this update, all ranks.
        """
        now = self.clock()
        self._recent.append((now - self._began_at, tokens, flops))
        self._steps += 1
        seconds, all_tokens, all_flops = (sum(column) for column in zip(*self._recent, strict=True))
        seconds = max(seconds, 1e-9)
        return Speed(
            seconds=now - self._began_at,
            tokens_per_second=all_tokens / seconds,
            mfu=all_flops / seconds / self.peak_flops,
            seconds_left=(self.num_steps - step) * (now - self._started_at) / self._steps,
        )
