from __future__ import annotations

from pathlib import Path

import pytest

from loopformers.errors import ConfigError
from loopformers.paths import expand_path


def test_only_a_home_folder_at_the_start_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert expand_path("~/runs/x") == "/home/someone/runs/x"
    assert expand_path(Path("~/runs")) == "/home/someone/runs"
    assert expand_path("~root/x") != "~root/x"
    for text in ("runs/~x", "./~", "bundled", "/a b/*.txt", "a$b", "./$HOME/x", "../[1]"):
        assert expand_path(text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("a\0b", "contains a NUL character"),
        ("a\udcff", "is not UTF-8 text"),
        ("~nobody-of-this-name/x", "there is no home folder of '~nobody-of-this-name'"),
        ("$HOME/x", "starts with an environment variable"),
        ("${HOME}/x", "starts with an environment variable"),
    ],
)
def test_what_names_no_file_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="where=.*" + said.replace("$", r"\$")):
        expand_path(text, "where")
