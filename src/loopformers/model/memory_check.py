"""Whether a model fits the memory of this machine, asked before any of it is taken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loopformers.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import os

    from loopformers.model.config import LoopConfig

__all__ = ["check_fits", "check_weights", "free_bytes", "machine_bytes"]

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux says what a container may take, in versions 2 and 1."""

GIB = 2**30

LEAST_BYTES = 0.25
"""Least bytes of a parameter on disk: quantised weights have been packed down to two bits."""


def machine_bytes() -> int:
    """Return the memory that this process could ever have: the machine's, or its container's where that is less."""
    import psutil  # type: ignore[import-untyped]  # accelerate brings it

    limits = [int(psutil.virtual_memory().total)]
    for file in CGROUP_LIMITS:
        try:
            limits.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return min(limits)


def free_bytes() -> int:
    """Return the memory that is free."""
    import psutil

    return min(int(psutil.virtual_memory().available), machine_bytes())


def check_fits(needed: int, what: str, remedy: str, *, available: int | None = None, room: int = 1) -> None:
    """Refuse what needs more memory than there is altogether.

    Args:
        needed: Bytes.
        what: Begins the error: who needs them, and for what.
        remedy: Ends it.
        available: Bytes that there are; default: `machine_bytes()`.
        room: How many times these must be exceeded: more than 1 where `needed` is an estimate.

    Raises:
        ConfigError: They are.
    """
    total = machine_bytes() if available is None else available
    if needed > room * total:
        raise ConfigError(
            f"{what} needs {needed / GIB:,.1f} GiB, and this machine has {total / GIB:,.1f} GiB; {remedy}"
        )


def check_weights(folder: str | os.PathLike[str], config: LoopConfig) -> None:
    """Refuse a checkpoint whose configuration describes far more parameters than its files can hold, or than fit in memory.

    Raises:
        CheckpointError: The weights on disk are too few.
        ConfigError: They are there, and do not fit.
    """
    count = config.num_parameters()
    on_disk = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if on_disk < count * LEAST_BYTES:
        raise CheckpointError(
            f"{Path(folder) / 'config.json'} describes {count:,} parameters, and the weights beside it have {on_disk:,} bytes, "
            "too few for them, perhaps missing or truncated; copy the weights again, or the config.json that was saved with them"
        )
    check_fits(on_disk, f"loading the weights in {folder}", "use a machine with more memory")
