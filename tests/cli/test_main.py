from __future__ import annotations

import argparse
import importlib
import re
import resource
import shlex
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from loopformers.cli import main as main_module
from loopformers.cli.main import COMMANDS, main
from loopformers.errors import ConfigError, LoopformersError

HEAVY = ["torch", "transformers", "datasets", "tokenizers", "numpy", "matplotlib", "rich"]


def parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"loopformers {name}")
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    return parser


def command_that(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Have `loopformers info` run an action in place of its module."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=action)
    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: module)


def raising(error: BaseException) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


# -- cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_heavy_and_takes_under_half_a_second_of_cpu(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom loopformers.cli.main import main\n"
        f"code = main({arguments!r})\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stderr == "[]\n"
    assert "loopformers" in result.stdout
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 0.5


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "loopformers", "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"loopformers \d+\.\d+\.\d+\n", result.stdout)


# -- help ---------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_with_its_line_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: loopformers COMMAND [options]\n")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.help)}$", text, re.MULTILINE)
    assert "examples:" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_a_description_an_example_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: loopformers {name} ")
    assert parser_of(name).description
    assert f"loopformers {name} " in str(parser_of(name).epilog)
    assert "--json" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_can_be_parsed(name: str) -> None:
    lines = re.findall(rf"loopformers {name} (.*)", str(parser_of(name).epilog))
    assert lines
    for line in lines:
        # What train's parser does not know are fields of its recipe.
        assert parser_of(name).parse_known_args(shlex.split(line))


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "commands:" in output.err


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [("generat", " did you mean 'generate'? Choose"), ("inof", " did you mean 'info'? Choose"), ("zzz", " choose")],
)
def test_an_unknown_command_is_named_with_the_nearest(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--json"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"error: command '{name}' is not known;{hint} one of: {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize("argv", [["--colour"], ["info"], ["info", "flt", "--no-such-option"]])
def test_a_bad_option_is_an_error_of_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "error: " in capsys.readouterr().err


def test_our_own_error_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(monkeypatch, raising(ConfigError("heads=3 must be even")))
    assert main(["info"]) == 2
    assert capsys.readouterr() == ("", "error: heads=3 must be even\n")


def test_a_file_that_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_that(monkeypatch, raising(PermissionError(13, "Permission denied", "/out")))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == (
        "error: '/out': permission denied; give a path that you have access to, or change its permissions\n"
    )


def test_ctrl_c_exits_as_shells_expect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command_that(monkeypatch, raising(KeyboardInterrupt()))
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    command_that(monkeypatch, lambda arguments: 7)
    assert main(["info"]) == 7


def test_a_reader_that_has_gone_ends_the_command_quietly() -> None:
    code = (
        "import sys\nfrom types import SimpleNamespace\nfrom loopformers.cli import main as m\n"
        "fake = SimpleNamespace(add_arguments=lambda p: None, run=lambda a: print('x' * 100) or 0)\n"
        "m.importlib.import_module = lambda name: fake\nsys.exit(m.main(['info']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_every_error_of_this_package_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in LoopformersError.__subclasses__():
        command_that(monkeypatch, raising(kind("text")))
        assert main(["info"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["generate", "m", "--promt", "x"],
            "option --promt is not known; did you mean --prompt? run loopformers generate --help",
        ),
        (
            ["generate", "m", "--prompt", "x", "--num-lops=3"],
            "option --num-lops is not known; did you mean --num-loops? ",
        ),
        (["evaluate", "budget", "m", "--no-tim"], "did you mean --no-time? run loopformers evaluate budget --help"),
        (["quickstart", "--zzz"], "option --zzz is not known; run loopformers quickstart --help"),
    ],
)
def test_a_misspelt_option_is_named_with_the_nearest_one(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
