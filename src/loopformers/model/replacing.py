"""A model's folder that is written aside and replaced as a whole, where nothing is deleted that is not a model's."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

from loopformers.errors import CheckpointError, CheckpointWarning
from loopformers.files import PARTIAL, writing
from loopformers.folders import check_free, owned
from loopformers.model.config import LoopConfig
from loopformers.readers import read_json

__all__ = ["check_replaceable", "replaced_folder"]

MODEL_FILES = re.compile(
    r"config\.json|generation_config\.json|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|"
    r"vocab\.(json|txt)|merges\.txt|chat_template\.(jinja|json)"
)
"""Names of files that models and tokenizers are saved under."""

CONVERTED, REPLACED = "converted", "replaced"


@contextlib.contextmanager
def replaced_folder(
    destination: str | os.PathLike[str], source: str | os.PathLike[str], *, overwrite: bool
) -> Iterator[Path]:
    """Yield a folder to write a model to; it takes the destination's place at the end of the block, if nothing failed.

    It stands beside the destination, hidden, with a name that does not change: where a process was killed while it put the
    new model into place, the next call finds the old one there, brings it back and warns with CheckpointWarning.

    Args:
        destination: Where the model goes.
        source: What the model is made of; it must not lie where it would be deleted.
        overwrite: Replace a model that is there.

    Raises:
        CheckpointError: The destination exists and may not be replaced.
        ConfigError: Another process is writing to it.
        WriteError: The new folder cannot be put into place; what was there is as it was.
    """
    target = Path(os.path.realpath(destination))
    origin = Path(os.path.realpath(source))
    if origin == target or target in origin.parents:
        raise CheckpointError(
            f"{target} is, or holds, the checkpoint that is converted ({origin}); give another folder"
        )
    scratch = target.with_name(f".{target.name}.converting")
    with owned(scratch):
        with writing(target):
            _recover(target, scratch)
        if target.exists():
            if not overwrite:
                raise CheckpointError(f"{target} exists already; choose another folder, or overwrite it explicitly")
            check_replaceable(target)
        try:
            yield scratch / CONVERTED
            with writing(target):
                _put_into_place(target, scratch)
        finally:
            shutil.rmtree(scratch / CONVERTED, ignore_errors=True)
    with contextlib.suppress(OSError):  # it was there before this call, and somebody else may own it now
        scratch.rmdir()


def check_replaceable(folder: Path) -> None:
    """Raise CheckpointError unless a folder holds a model of this package and nothing else; ConfigError if it is in use."""
    rest = "move it away, or give another folder"
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and is not replaced by a folder; {rest}")
    check_free(folder)
    config = folder / "config.json"
    if not config.exists():
        raise CheckpointError(f"{folder} is no model's folder (it has no config.json), and is not replaced; {rest}")
    model_type = read_json(config, remedy=f"the folder is not replaced; {rest}").get("model_type")  # type: ignore[var-annotated]
    if model_type != LoopConfig.model_type:
        raise CheckpointError(f"{folder} holds a model of type {model_type!r}, and is not replaced; {rest}")
    for entry in sorted(folder.iterdir()):
        is_known = MODEL_FILES.fullmatch(entry.name) or PARTIAL.fullmatch(entry.name)
        if not is_known or entry.is_dir():
            raise CheckpointError(
                f"{folder} holds {entry.name!r}, which no conversion writes, and is not replaced; {rest}"
            )


def _put_into_place(target: Path, scratch: Path) -> None:
    if target.exists():
        check_replaceable(target)  # reading and converting took a while
        os.replace(target, scratch / REPLACED)
    try:
        os.replace(scratch / CONVERTED, target)
    except OSError:
        if (scratch / REPLACED).exists():
            os.replace(scratch / REPLACED, target)
        raise
    shutil.rmtree(scratch / REPLACED, ignore_errors=True)


def _recover(target: Path, scratch: Path) -> None:
    """Undo what a killed process had begun."""
    shutil.rmtree(scratch / CONVERTED, ignore_errors=True)
    # Earlier versions wrote to a folder with a name of its own for each call.
    earlier = sorted(target.parent.glob(f".{glob.escape(target.name)}-????????/{REPLACED}/config.json"))
    for replaced in (scratch / REPLACED, *(config.parent for config in earlier)):
        if not replaced.is_dir():
            continue
        if not target.exists():
            os.replace(replaced, target)
            warnings.warn(
                f"a conversion into {target} was killed before its model was in place; the model that was there before is back",
                CheckpointWarning,
                stacklevel=4,
            )
        elif replaced.parent == scratch:  # the new model is in place
            shutil.rmtree(replaced, ignore_errors=True)
