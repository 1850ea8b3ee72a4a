"""lm-evaluation-harness's own command line, with our models and groups of tasks in it.

    python -m loopformers.evaluation.run_lm_eval run --model loopformers --model_args pretrained=DIR,num_loops=4 --tasks piqa

The harness (0.4.13) has no entry point group through which an installed package could add a model: its registry is filled
by import alone. This module is the entry point: it enters ours into that registry and hands over, with all arguments.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

from loopformers.boundary import run_command
from loopformers.errors import ConfigError, LoopformersError, first_line

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness's command line.

    Args:
        argv: Its arguments; default: the process's.

    Returns:
        Exit code, see `run_command`.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(given))


def _run(given: list[str]) -> None:
    for argument in given:
        if "trust_remote_code" in argument and not argument.lower().endswith("trust_remote_code=false"):
            raise ConfigError(f"{argument}: code in a checkpoint or a dataset never runs here; leave it out")
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from loopformers.evaluation.harness import register
    from loopformers.evaluation.task_list import GROUPS_DIR

    if "--tasks" in given and "--include_path" not in given:
        given += ["--include_path", str(GROUPS_DIR)]
    given = _own_cache(given)
    register()
    setup_logging()
    before = sys.argv
    sys.argv = ["lm_eval", *given]  # its parser reads nothing else
    try:
        cli = HarnessCLI()
        cli.execute(cli.parse_args())
    except (ValueError, FileNotFoundError, TypeError) as error:
        if isinstance(error, LoopformersError):
            raise
        raise ConfigError(
            f"lm-eval refuses the arguments: {first_line(error)}; run with --help for what it takes"
        ) from error
    finally:
        sys.argv = before


def _own_cache(given: list[str]) -> list[str]:
    """Give each model, with its number of loops and schedule, a cache of its own.

    The harness keys its cache of answers by question and not by model, and would answer for 12 loops what 4 loops said.
    """
    model: list[str] = []
    taken = False
    for argument in given:
        if argument.startswith("-"):
            taken = argument.partition("=")[0] in ("--model_args", "-a", "--model", "-M")
        if taken:
            model.append(argument)
    digest = hashlib.sha256("\0".join(model).encode()).hexdigest()[:8]
    own: list[str] = []
    is_path = False
    for argument in given:
        name, equals, _ = argument.partition("=")
        holds_path = is_path or (name == "--use_cache" and bool(equals))
        own.append(f"{argument}-{digest}" if holds_path else argument)
        is_path = not holds_path and name in ("--use_cache", "-c")
    return own


if __name__ == "__main__":
    sys.exit(main())
