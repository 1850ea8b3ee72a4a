from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from loopformers.cli import main as cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_readmes_python_runs(capsys):
    (block,) = blocks(ROOT / "README.md", "python")
    exec(compile(block, "README.md", "exec"), {})
    assert "'short_cross_entropy'" in capsys.readouterr().out


COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("loopformers ")
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_on_a_page_is_one_that_we_have(command):
    argv = shlex.split(re.sub(r"\$\w+", "dir", command))[1:]  # a shell puts its variables in first
    parser, subparsers = cli._parser()
    module = importlib.import_module(cli.COMMANDS[argv[0]].module)
    module.add_arguments(subparsers[argv[0]])
    subparsers[argv[0]].takes_overrides = getattr(module, "TAKES_OVERRIDES", False)
    parser.parse_known_args(argv)  # exits on an option's bad value
    if argv[0] not in ("train", "plan"):  # these take any field of a recipe
        parser.parse_args(argv)


def test_the_pages_show_each_command():
    shown = {command.split()[1] for command in COMMANDS}
    assert shown == set(cli.COMMANDS)


TARGETS = {
    "quickstart",
    "test",
    "check",
    "test-lowest",
    "test-instruction-sets",
    "test-others",
    "test-others-full",
    "benchmarks",
}


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_make_target_on_a_page_is_in_the_makefile(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_no_page_names_another_make_target():
    text = "\n".join(page.read_text(encoding="utf-8") for page in [*PAGES, ROOT / "CONTRIBUTING.md"])
    named = set(re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, flags=re.MULTILINE))
    assert {name for pair in named for name in pair if name} <= TARGETS
