from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from loopformers.data.tokenizer import bundled_tokenizer
from loopformers.testing import tiny_model

SCRIPT = Path(__file__).parents[2] / "examples" / "adaptive_exit.py"


@pytest.mark.parametrize("preset", ["lt-input", "elastic-flt"])
def test_the_example_calibrates_measures_and_generates(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = bundled_tokenizer()
    tiny_model(preset, num_loops=5, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    main = runpy.run_path(str(SCRIPT))["main"]
    main(
        [str(tmp_path), "--average-loops", "3", "--rule", "state", "--max-new-tokens", "4", "--prompts", "It was", "He"]
    )
    report = capsys.readouterr().out
    average = re.search(r"^state:[\d.]+: measured on \d+ held-out tokens, loss [\d.]+ at ([\d.]+) loops", report)
    assert average is not None
    assert float(average[1]) == pytest.approx(3, rel=0.05)
    rows = re.findall(r"^([\d.]+) loops a token, ([\d ]+)\n  (It was|He)", report, flags=re.MULTILINE)
    assert [row[2] for row in rows] == ["It was", "He"]
    for mean, loops, _ in rows:
        counts = [int(n) for n in loops.split()]
        assert all(2 <= n <= 5 for n in counts)
        assert float(mean) == pytest.approx(sum(counts) / len(counts), abs=0.01)
