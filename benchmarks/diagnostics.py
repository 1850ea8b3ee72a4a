"""What watching every update costs: training with its diagnostics against the same training without any.

    python benchmarks/diagnostics.py --threads 1 --json diagnostics.json

Both train the same model on the same windows in one process, one update each in turn, and a ratio is the median over such
pairs. With one thread, time is the CPU time of this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from speed import Comparison, compare

from loopformers.training.engine import EngineSettings
from training import Sizes, run, take_turns


def measure(sizes: Sizes, repeats: int) -> list[Comparison]:
    rows = []
    for preset in sizes.presets:
        engines = {"watched": EngineSettings(), "blind": EngineSettings(diagnostics=False)}
        millis = take_turns(preset, sizes, repeats, engines)
        name = f"{preset}: step with diagnostics / without"
        rows.append(
            compare(millis["watched"], millis["blind"], section="diagnostics", name=name, unit="ms a step", target=1.03)
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run this benchmark."""
    return run(argv, __doc__, {"diagnostics": measure})


if __name__ == "__main__":
    sys.exit(main())
