"""The arguments that say which text a model is scored on, shared by the commands that evaluate."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopformers.cli.parser import count
from loopformers.cli.paths import path
from loopformers.errors import ConfigError

if TYPE_CHECKING:
    from loopformers.evaluation.text import ScoredText
    from loopformers.model.config import LoopConfig

__all__ = ["TASK", "add_text_arguments", "check_tokenizer", "label_models", "read_scored_text"]

TASK = "task"
"""The source that stands for the task a model was trained on."""


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--data` and what goes with it."""
    group = parser.add_argument_group("what is scored")
    group.add_argument(
        "--data",
        type=path,
        default="bundled",
        metavar="SOURCE",
        help="text: bundled, a file, a folder or a datasets name; or task: held-out rows of the synthetic task that MODEL's "
        "recipe trained it on (default: %(default)s)",
    )
    group.add_argument(
        "--split", default="validation", help="of it: train, validation, test, or all (default: %(default)s)"
    )
    group.add_argument(
        "--split-by",
        choices=("document", "id", "tail"),
        default="document",
        help="as in the recipe that trained the model: tail cuts each document in three (default: %(default)s)",
    )
    group.add_argument(
        "--windows",
        type=count(),
        default=256,
        metavar="N",
        help="maximum number of windows, evenly spaced (default: %(default)s)",
    )
    group.add_argument(
        "--seq-len",
        type=count(),
        metavar="N",
        help="tokens in a window (default: the shortest max_position_embeddings)",
    )
    group.add_argument(
        "--batch-size", type=count(), default=8, metavar="B", help="windows at a time (default: %(default)s)"
    )
    group.add_argument("--tokenizer", type=path, metavar="DIR", help="folder of the tokenizer (default: MODEL)")


def read_scored_text(arguments: argparse.Namespace, configs: Mapping[str, LoopConfig]) -> dict[str, ScoredText]:
    """Read the text, and cut it into windows of each model's tokens.

    Args:
        arguments: See `add_text_arguments`.
        configs: By folder, what the models are.

    Returns:
        By folder, the windows; models of one tokenizer share theirs.

    Raises:
        ConfigError: A number below what makes sense, windows beyond learned positions, a tokenizer of another model, or no
            task where the models' own is asked for.
        CheckpointError: No tokenizer.
        DataError: No text, or less than one window.
    """
    from loopformers.cli.checkpoint import load_tokenizer
    from loopformers.data.packing import check_seq_len
    from loopformers.evaluation.text import read_documents, read_windows

    if arguments.data == TASK:
        return dict.fromkeys(configs, read_task_rows(list(configs), arguments.windows))
    seq_len = arguments.seq_len
    if seq_len is None:
        seq_len = min(config.max_position_embeddings for config in configs.values())
    check_seq_len(seq_len)
    for folder, config in configs.items():
        if config.position_embedding == "learned" and seq_len > config.max_position_embeddings:
            raise ConfigError(
                f"--seq-len {seq_len} is more than the {config.max_position_embeddings} positions that {folder} learned; "
                "give a smaller one"
            )
    tokenizers = {folder: load_tokenizer(arguments.tokenizer or folder) for folder in configs}
    for folder, tokenizer in tokenizers.items():
        check_tokenizer(tokenizer, configs[folder].vocab_size, folder)
    documents = read_documents(arguments.data, arguments.split, split_by=arguments.split_by)
    return {
        folder: read_windows(documents, tokenizer, seq_len=seq_len, num_windows=arguments.windows)
        for folder, tokenizer in tokenizers.items()
    }


def read_task_rows(folders: list[str], num_rows: int) -> ScoredText:
    """Return held-out rows of the task that all models were trained on, as their recipes say.

    Raises:
        ConfigError: A folder without a recipe, a recipe without a task, or two tasks.
    """
    from loopformers.data.synthetic.rows import held_out_rows
    from loopformers.evaluation.text import ScoredText
    from loopformers.training.recipe_file import load
    from loopformers.training.run_folder import RECIPE_FILE

    tasks = {}
    for folder in folders:
        file = Path(folder) / RECIPE_FILE
        tasks[folder] = load(file).task if file.exists() else None
        if tasks[folder] is None:
            raise ConfigError(
                f"--data {TASK}: {folder} was not trained on a synthetic task, or holds no {RECIPE_FILE} that says so; give "
                "a text"
            )
        if tasks[folder] != tasks[folders[0]]:
            raise ConfigError(
                f"--data {TASK}: {folders[0]} and {folder} were trained on different tasks ({tasks[folders[0]]}; "
                f"{tasks[folder]}), whose scores do not compare; evaluate them one by one"
            )
    task = tasks[folders[0]]
    assert task is not None
    rows = held_out_rows(task, num_rows)
    return ScoredText([rows.row(i) for i in range(len(rows))], bytes_per_token=None)


def check_tokenizer(tokenizer: Any, vocab_size: int, folder: str) -> None:
    """Raise ConfigError where a tokenizer has more entries than a model knows."""
    from loopformers.model.tokenizer import vocabulary_size

    if vocabulary_size(tokenizer) > vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary_size(tokenizer)} entries, and {folder} knows {vocab_size}; give the model's own with "
            "--tokenizer"
        )


def label_models(folders: list[str]) -> dict[str, str]:
    """Name each model after its folder, by the whole path where two names are the same.

    Returns:
        By folder, the name, in order.

    Raises:
        ConfigError: One folder twice.
    """
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ConfigError(f"{twice} is given twice; give each model once")
    names = [Path(folder).resolve().name for folder in folders]
    return {folder: name if names.count(name) == 1 else folder for folder, name in zip(folders, names, strict=True)}
