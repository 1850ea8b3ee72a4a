"""The schedule that a checkpoint generates by where none is asked for: an entry of its generation configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig

from loopformers.errors import ConfigError
from loopformers.files import write_whole
from loopformers.readers import read_json
from loopformers.schedule import Schedule

if TYPE_CHECKING:
    from loopformers.model.config import LoopConfig

__all__ = ["GENERATION_CONFIG_FILE", "check_saved_schedule", "read_schedule", "save_schedule"]

GENERATION_CONFIG_FILE = "generation_config.json"


def check_saved_schedule(saved: Any, config: LoopConfig) -> Schedule | None:
    """Return the run that a generation configuration's `schedule` names; None where there is none.

    Raises:
        ConfigError: The model cannot run it.
    """
    if saved is None:
        return None
    try:
        return config.resolve_schedule(schedule=saved)
    except ConfigError as error:
        raise ConfigError(
            f"the generation configuration names a schedule that this model cannot run: {error}; save another with "
            "`loopformers evaluate schedules --save`, or set generation_config.schedule to None"
        ) from error


def read_schedule(folder: str | os.PathLike[str], config: LoopConfig) -> Schedule | None:
    """Return the schedule that is saved in a checkpoint's folder; None where there is none.

    Raises:
        CheckpointError: A generation configuration that cannot be read.
        ConfigError: A schedule that the model cannot run.
    """
    fields = _read(Path(folder) / GENERATION_CONFIG_FILE)
    return None if fields is None else check_saved_schedule(fields.get("schedule"), config)


def save_schedule(folder: str | os.PathLike[str], schedule: Schedule, config: LoopConfig) -> Path:
    """Make a schedule the default run of a checkpoint's `generate`; its other settings stay.

    Args:
        folder: Of the checkpoint.
        schedule: A run of the model.
        config: The model's.

    Returns:
        The file that was written.

    Raises:
        ConfigError: The model cannot run it.
        CheckpointError: A generation configuration that is no JSON.
    """
    check_saved_schedule(schedule, config)
    path = Path(folder) / GENERATION_CONFIG_FILE
    fields = _read(path)
    if fields is None:
        fields = GenerationConfig.from_model_config(config).to_diff_dict()
    # transformers drops entries of its own making when it believes that the file follows from config.json
    fields = {name: value for name, value in fields.items() if name != "_from_model_config"}
    return write_whole(path, json.dumps(fields | {"schedule": str(schedule)}, indent=2, sort_keys=True) + "\n")


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return read_json(path, dict, remedy="remove it, or save the model again")
