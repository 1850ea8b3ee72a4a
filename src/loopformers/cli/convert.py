"""`loopformers convert`: an official checkpoint becomes a folder that `from_pretrained` opens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loopformers.cli.console import print_heading, print_json, print_note
from loopformers.cli.parser import count
from loopformers.cli.paths import path, path_object
from loopformers.errors import ConfigError
from loopformers.readers import read_json

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Convert a checkpoint of the released FLT or LoopFormer code. Nothing in the file is executed, every tensor finds its\n"
        "place or the command fails, and the output folder appears complete or not at all."
    )
    parser.epilog = (
        "examples:\n"
        "  loopformers convert out/loopformer/ckpt.pt models/loopformer-3x8 --num-loops 8\n"
        "  loopformers convert checkpoints/d6 models/flt-small --tokenizer tokenizers/d6"
    )
    parser.add_argument(
        "official", type=path, metavar="OFFICIAL", help="model_*.pt, ckpt.pt or *.safetensors, or the folder of one"
    )
    parser.add_argument("output", type=path, metavar="OUT", help="folder to write")
    parser.add_argument(
        "--case",
        type=path_object,
        metavar="FILE",
        help="JSON with fields of the official constructor that the checkpoint lacks",
    )
    parser.add_argument(
        "--num-loops", type=count(), metavar="T", help="loops it was trained with; LoopFormer's files do not say"
    )
    parser.add_argument("--tokenizer", type=path, metavar="DIR", help="folder of a tokenizer to save with the weights")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace OUT if it is a model's folder without other files"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    case = None if arguments.case is None else _read_case(arguments.case)
    from loopformers.model.convert import convert_checkpoint
    from loopformers.model.quiet import quiet_transformers

    with quiet_transformers():
        config = convert_checkpoint(
            arguments.official,
            arguments.output,
            case=case,
            num_loops=arguments.num_loops,
            tokenizer=arguments.tokenizer,
            overwrite=arguments.overwrite,
        )
    result = {
        "official": arguments.official,
        "output": arguments.output,
        "num_parameters": config.num_parameters(),
        "num_loops": config.num_loops,
        "tokenizer": arguments.tokenizer,
        "files": sorted(file.name for file in Path(arguments.output).iterdir()),
    }
    if arguments.json:
        print_json(result)
        return 0
    print_heading(f"Converted {arguments.official} to {arguments.output}")
    print_note(
        f"{config.num_parameters():,} parameters, {config.num_hidden_layers} layers looped {config.num_loops} times; "
        f'load them with LoopedForCausalLM.from_pretrained("{arguments.output}")'
    )
    return 0


def _read_case(file: Path) -> dict[str, Any]:
    remedy = "give --case a file with one JSON object of the constructor's fields"
    return read_json(file, dict, error=ConfigError, remedy=remedy)
