from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "benchmarks" / "older.py")
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)


def test_a_tree_against_itself_is_measured_and_reported_twice(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = run(str(ROOT), "--fast", "--repeats", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["comparisons"]
    assert [row["section"] for row in rows] == ["training step", "forward", "decoding, batch 1", "decoding, batch 8"]
    assert all(row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    assert "flt, width 32" in done.stdout


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    done = run(str(tmp_path), "--fast")
    assert done.returncode == 1
    assert "did not start" in done.stderr
