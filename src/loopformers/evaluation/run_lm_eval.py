"""lm-evaluation-harness's own command line, with our models and groups of tasks in it.

    python -m loopformers.evaluation.run_lm_eval run --model loopformers --model_args pretrained=DIR,num_loops=4 --tasks piqa

The harness (0.4.13) has no entry point group through which an installed package could add a model: its registry is filled
by import alone. This module is the entry point: it enters ours into that registry and hands over, with all arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from loopformers.boundary import run_command

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
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    from loopformers.evaluation.harness import register
    from loopformers.evaluation.task_list import GROUPS_DIR

    if "--tasks" in given and "--include_path" not in given:
        given += ["--include_path", str(GROUPS_DIR)]
    register()
    setup_logging()
    before = sys.argv
    sys.argv = ["lm_eval", *given]  # its parser reads nothing else
    try:
        cli = HarnessCLI()
        cli.execute(cli.parse_args())
    finally:
        sys.argv = before


if __name__ == "__main__":
    sys.exit(main())
