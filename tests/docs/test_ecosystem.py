from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "ecosystem.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # PEFT asks so
def test_the_python_of_the_page_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, object] = {}
    for block in blocks:
        if "BitsAndBytesConfig" in block and find_spec("bitsandbytes") is None:
            block = block.replace(", quantization_config=BitsAndBytesConfig(load_in_8bit=True)", "")
        exec(compile(block, "ecosystem.md", "exec"), names)
    assert names["prefixed"].active_peft_config.num_virtual_tokens == 8  # type: ignore[attr-defined]
    assert names["arguments"].label_smoothing_factor == 0.1  # type: ignore[attr-defined]
    assert names["small"].config.objective == "last_loop"  # type: ignore[attr-defined]
