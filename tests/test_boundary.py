from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from loopformers import startup
from loopformers.boundary import MAX_LINE, one_line, run_command
from loopformers.errors import ConfigError

FAKE = """
import sys
from types import SimpleNamespace
from loopformers.cli import main as module
def run(arguments):
    {body}
module.importlib.import_module = lambda name: SimpleNamespace(add_arguments=lambda parser: None, run=run)
sys.argv = ["loopformers", "info"]
sys.exit(module.main())
"""
"""A process whose command `info` does what a test says."""


@pytest.fixture(autouse=True)
def details(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Details files go to a folder of the test."""
    monkeypatch.delenv("LOOPFORMERS_DEBUG", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def end(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and stderr of a command that raises."""

    def command() -> int:
        raise error

    code = run_command(command)
    output = capsys.readouterr()
    assert output.out == ""
    return code, output.err


def process(body: str, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a fake command in a process of its own, with redirections of a shell."""
    code = FAKE.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip())
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {shell}', sys.executable, code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=60,
    )


# -- errors ------------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_is_one_line_and_a_private_file_with_the_details(
    details: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["loopformers", "generate", "m", "--prompt", "my diary", "--hf-token=hf_abc"])
    code, said = end(ZeroDivisionError("ours\nsecond line"), capsys)
    assert code == 70
    start = "error: unexpected ZeroDivisionError: ours; this is a bug in loopformers: report it with the details in "
    assert said.startswith(start)
    assert said.count("\n") == 1
    file = Path(said.removeprefix(start).strip())
    text = file.read_text(encoding="utf-8")
    assert "Traceback" in text
    assert "second line" in text
    assert re.search(rf"^torch {re.escape(torch.__version__.partition('+')[0])}", text, re.MULTILINE)
    assert "loopformers generate m --prompt ... --hf-token=..." in text
    assert "diary" not in text
    assert file.stat().st_mode & 0o077 == 0


def test_where_no_details_can_be_written_the_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    code, said = end(KeyError("ours"), capsys)
    assert code == 70
    assert "LOOPFORMERS_DEBUG=1 shows (no details file: No such file or directory)" in said


@pytest.mark.parametrize(("error", "code"), [(KeyError("ours"), 70), (ConfigError("theirs"), 2)])
def test_the_debug_variable_shows_the_traceback(
    error: Exception, code: int, details: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPFORMERS_DEBUG", "1")
    got, said = end(error, capsys)
    assert got == code
    assert said.startswith("Traceback")
    assert list(details.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "error: out of memory: this machine does not have enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried .."), "error: out of memory: this machine does not"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
            "error: out of memory (Default",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "error: stdout, or a file that was being written: no space"),
        (OSError(errno.ENOSPC, "No space left on device", "/out/a"), "error: '/out/a': no space left on device; make"),
        (PermissionError(errno.EACCES, "Permission denied", b"/out"), "error: b'/out': permission denied; give a path"),
        (OSError(errno.ENOENT, "No such file or directory", "a", None, "b"), "error: 'a' -> 'b': no such file"),
        (OSError("the hub is gone.\nlong advice"), "error: the hub is gone\n"),
        ("é".encode() and UnicodeEncodeError("ascii", "aé", 1, 2, "ordinal not in range"), "error: '\\xe9' cannot be"),
        (UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid start byte"), "error: byte 1 of a text is not utf-8"),
        (ConfigError("first\n  second"), "error: first second\n"),
        (ConfigError("name \x1b[2J\x07"), "error: name \\x1b[2J\\x07\n"),
    ],
)
def test_what_a_user_can_put_right_is_one_line_with_a_remedy(
    error: Exception, text: str, details: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = end(error, capsys)
    assert code == 2
    assert said.startswith(text)
    assert said.count("\n") == 1
    assert list(details.iterdir()) == []


def test_too_deep_a_recursion_blames_the_input_first(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = end(RecursionError("maximum recursion depth exceeded"), capsys)
    assert code == 70
    assert "; its input is nested too deeply, or this is a bug in loopformers: report it with" in said


def test_a_huge_message_is_shortened() -> None:
    line = one_line("a" * 10_000_000 + "\tend")
    assert len(line) < MAX_LINE + 100
    assert line.endswith("aend") or line.endswith("\\tend")


# -- streams -----------------------------------------------------------------------------------------------------


def test_a_closed_stdout_is_refused_before_any_work() -> None:
    result = process("raise SystemError('worked')", ">&-")
    assert (result.returncode, result.stderr) == (
        2,
        "error: stdout is closed, but results are printed there; leave it open, or redirect it to /dev/null\n",
    )


def test_closed_stdin_and_stderr_are_no_obstacle_and_no_file_takes_their_place(tmp_path: Path) -> None:
    body = f"""
    with open({str(tmp_path / "f")!r}, "w") as file:
        print(file.fileno() > 2)
    import os
    os.write(2, b"lost")
    """
    result = process(body, "<&- 2>&-")
    assert (result.returncode, result.stdout, result.stderr) == (0, "True\n", "")
    assert (tmp_path / "f").read_text() == ""


def test_python_without_docstrings_is_refused_by_name() -> None:
    result = process("print('worked')", PYTHONOPTIMIZE="2")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: Python runs with PYTHONOPTIMIZE=2 (-OO), which strips docstrings")
    assert process("print('worked')", PYTHONOPTIMIZE="1").stdout == "worked\n"


def test_a_full_disk_below_stdout_is_named() -> None:
    result = process("print('x' * 10)", "> /dev/full", PYTHONUNBUFFERED="")
    assert result.returncode == 2
    assert result.stderr.startswith("error: 'stdout': no space left on device; make room on the disk")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "body",
    [
        "print('x' * 100_000); print('y' * 100_000)",
        "import sys\n[print('x' * 1000, file=sys.stderr) for _ in range(1000)]",
        "from loopformers.cli.console import print_note\n[print_note('x' * 1000) for _ in range(1000)]",
        "import time; time.sleep(0.5); raise ValueError('nobody reads this')",
    ],
)
def test_a_reader_of_both_streams_that_has_gone_ends_the_command_quietly(body: str) -> None:
    result = process(body, "2>&1 | head -c 1 >/dev/null; echo ${PIPESTATUS[0]}" if "sleep" not in body else
                     "2>&1 | true; echo ${PIPESTATUS[0]}")  # fmt: skip
    assert (result.stdout, result.stderr) == ("141\n", "")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "caf\\xe9 \\udcff\n"),
        ({"PYTHONIOENCODING": "ascii"}, "caf\\xe9 \\udcff\n"),
        ({"PYTHONIOENCODING": "latin-1:strict"}, "caf\xe9 \\udcff\n"),
        ({"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}, "café \\udcff\n"),
    ],
)
def test_any_text_can_be_printed_in_any_locale(environment: dict[str, str], shown: str) -> None:
    body = r"print('caf\xe9 \udcff'); print('caf\xe9 \udcff', file=sys.stderr)"
    encoding = "latin-1" if "latin-1" in str(environment) else "utf-8"
    code = FAKE.format(body=body)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **environment}, check=False
    )
    assert result.returncode == 0
    assert result.stdout.decode(encoding) == shown
    assert result.stderr.decode(encoding) == shown


# -- Ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["loopformers", "-m"])
def test_an_interrupt_during_the_imports_is_one_line(program: str) -> None:
    code = f"import sys; sys.argv = ['/bin/{program}']; import loopformers; raise KeyboardInterrupt"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "interrupted\n")


def test_programs_that_import_the_package_keep_their_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*error: Any) -> None: ...

    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(sys, "argv", ["jupyter"])
    startup.silence_early_interrupts()
    assert sys.excepthook is hook


def test_other_errors_during_the_imports_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["loopformers"])
    startup.silence_early_interrupts()
    sys.excepthook(ValueError, ValueError("broken"), None)
    assert "ValueError: broken" in capsys.readouterr().err


def test_an_exit_with_a_text_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(SystemExit("lm-eval is not well"), capsys) == (1, "error: lm-eval is not well\n")
    assert end(SystemExit(None), capsys) == (0, "")


def test_streams_that_are_not_the_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert run_command(lambda: print("fine")) == 0
