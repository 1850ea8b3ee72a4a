"""What a launcher of several processes (torchrun, accelerate launch) says in the environment, checked before anyone acts."""

from __future__ import annotations

import os

from loopformers.errors import ConfigError

__all__ = ["check_launcher", "process_rank", "world_size"]

RULE = "torchrun and accelerate launch set it; unset it to train in one process"
VARIABLES = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""By name, the smallest legal value."""
MAX_PROCESSES = 2**20


def world_size() -> int:
    """Return how many processes train together: 1 without a launcher.

    Raises:
        ConfigError: WORLD_SIZE is no number of processes.
    """
    return _read("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1


def process_rank() -> int:
    """Return the rank of this process: 0 without a launcher.

    Raises:
        ConfigError: RANK is no rank.
    """
    return _read("RANK", 0) if "RANK" in os.environ else 0


def check_launcher() -> int:
    """Return the rank of this process: 0 without a launcher.

    Raises:
        ConfigError: A variable is no number, does not fit another, or the address at which processes meet is missing.
    """
    values = {name: _read(name, at_least) for name, at_least in VARIABLES.items() if name in os.environ}
    if values.get("LOCAL_RANK") == -1:  # transformers' and accelerate's word for one process
        del values["LOCAL_RANK"]
    world = values.get("WORLD_SIZE", 1)
    for rank, size in (("RANK", world), ("LOCAL_RANK", values.get("LOCAL_WORLD_SIZE", world))):
        if values.get(rank, 0) >= size:
            raise ConfigError(f"{rank}={values[rank]} with {size} process(es): ranks are counted from 0; {RULE}")
    if world > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ConfigError(
                    f"WORLD_SIZE={world} but {name} is not set, so the processes cannot meet; start the command with torchrun or "
                    "accelerate launch, or unset WORLD_SIZE to train in one process"
                )
    return values.get("RANK", 0)


def _read(name: str, at_least: int) -> int:
    text = os.environ[name].strip()
    if name == "LOCAL_RANK" and text == "-1":
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10 and at_least <= int(text) <= MAX_PROCESSES):
        raise ConfigError(f"{name}={os.environ[name][:40]!r} must be a whole number of at least {at_least}; {RULE}")
    return int(text)
