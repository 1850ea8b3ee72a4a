"""The boundary between a command and the shell: however a command ends, the shell gets an exit code and at most one line.

`run_command` is the one place that does this, for the command `loopformers` and for modules that are run with `python -m`.
It imports nothing heavy, so that help stays cheap and Ctrl-C is caught early.
"""

from __future__ import annotations

import errno
import importlib.metadata
import io
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence

from loopformers.environment import DEBUG
from loopformers.errors import ConfigError, LoopformersError, first_line

__all__ = [
    "BROKEN_PIPE",
    "INTERRUPTED",
    "SUCCESS",
    "UNEXPECTED",
    "USAGE_ERROR",
    "one_line",
    "run_command",
]

SUCCESS = 0
USAGE_ERROR = 2
"""Exit code for errors that the user can fix; argparse uses the same one."""
UNEXPECTED = 70
"""Exit code for a bug in this package (EX_SOFTWARE of sysexits.h)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""
BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone: 128 + SIGPIPE."""

MAX_LINE = 2000
"""Longest error that is printed whole. A value of ten megabytes must not fill the terminal."""

PRIVATE_OPTIONS = ("--prompt", "token", "password", "secret", "key")
"""Options with these words in their name keep their values out of the details file."""

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "accelerate", "numpy", "lm_eval")
"""Packages whose versions a report of a fault needs."""

CHECK_PATH = "check the path"
REMEDIES = {
    errno.ENOSPC: "make room on the disk, or write to another one, and run the same command again",
    errno.EDQUOT: "make room in your quota, or write to another disk, and run the same command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or write to another disk",
    errno.EACCES: "give a path that you have access to, or change its permissions",
    errno.EPERM: "give a path that you have access to, or change its permissions",
    errno.EROFS: "give a path on a disk that is not read-only",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOENT: CHECK_PATH,
    errno.ENOTDIR: CHECK_PATH,
    errno.EISDIR: CHECK_PATH,
    errno.ENAMETOOLONG: CHECK_PATH,
    errno.ELOOP: CHECK_PATH,
}
"""What to do about an error of the system, by its number."""

OUT_OF_MEMORY = (
    "this machine does not have enough memory; use a smaller model, batch, sequence or number of loops, or a machine "
    "with more memory"
)
ALLOCATOR_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
)
"""How torch says in a plain RuntimeError that it could not get memory."""


def run_command(command: Callable[[], int | None]) -> int:
    """Run a command; whatever it raises becomes one line on stderr.

    Args:
        command: Does the work and returns the exit code; None stands for success.

    Returns:
        Exit code: the command's, `USAGE_ERROR` for what the user can put right, `UNEXPECTED` for a fault of this package,
        `INTERRUPTED` after Ctrl-C, or `BROKEN_PIPE` when the reader of stdout or stderr has gone.
    """
    try:
        _prepare_streams()
        if sys.flags.optimize > 1:
            raise ConfigError(
                "Python runs with PYTHONOPTIMIZE=2 (-OO), which strips docstrings that transformers needs; unset it, or use 1"
            )
        code = command() or SUCCESS
        _flush_stdout()  # here a full disk, or a reader that has gone, is still noticed
        return code
    except BaseException as error:
        try:
            return _end(error)
        except BrokenPipeError:  # nobody reads stderr any more
            return _leave_pipes()
        except KeyboardInterrupt:
            return INTERRUPTED


def one_line(text: str) -> str:
    """Return a text as one printable line of limited length: whatever was in a file or a name cannot steer a terminal."""
    text = " ".join(part.strip() for part in text.splitlines() if part.strip())
    if len(text) > MAX_LINE:
        text = f"{text[: MAX_LINE * 3 // 4]} [.. {len(text) - MAX_LINE:,} characters ..] {text[-MAX_LINE // 4 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _end(error: BaseException) -> int:
    """Say how a command ended, and return its exit code."""
    match error:
        case SystemExit():  # argparse, after --help
            if isinstance(error.code, str):
                _say(f"error: {error.code}")
                return 1
            return SUCCESS if error.code is None else error.code
        case KeyboardInterrupt():
            _say("interrupted")
            return INTERRUPTED
        case BrokenPipeError():
            return _leave_pipes()
    known = _explain(error)
    if os.environ.get(DEBUG, "") not in ("", "0"):
        sys.stderr.write("".join(traceback.format_exception(error)))
    elif known is None:
        _say(f"error: unexpected {type(error).__name__}: {first_line(error)}; {_report(error)}")
    else:
        _say(f"error: {known}")
    return UNEXPECTED if known is None else USAGE_ERROR


def _explain(error: BaseException) -> str | None:
    """Return what went wrong in words, or None where it must be a fault of this package."""
    memory_errors = (MemoryError, getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError))
    text = str(error)
    if isinstance(error, LoopformersError):
        return text or type(error).__name__
    if isinstance(error, memory_errors):
        return f"out of memory: {OUT_OF_MEMORY}"
    if isinstance(error, RuntimeError) and any(message in text for message in ALLOCATOR_MESSAGES):
        return f"out of memory ({first_line(error)}): {OUT_OF_MEMORY}"
    if isinstance(error, UnicodeEncodeError):
        piece = ascii(error.object[error.start : error.end][:20])
        return f"{piece} cannot be written as {error.encoding} ({error.reason}); give text in UTF-8"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} of a text is not {error.encoding} ({error.reason}); give text in UTF-8"
    if isinstance(error, OSError):
        return _explain_os_error(error)
    return None


def _explain_os_error(error: OSError) -> str | None:
    if error.errno is None or error.strerror is None:  # raised by a library, with a text of its own
        return first_line(error) if str(error) else None
    paths = [repr(os.fspath(p)) if isinstance(p, str | bytes | os.PathLike) else str(p)
             for p in (error.filename, error.filename2) if p is not None]  # fmt: skip
    is_writing = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # writes carry no path
    place = " -> ".join(paths) or ("stdout, or a file that was being written" if is_writing else "")
    reason = error.strerror[:1].lower() + error.strerror[1:]
    remedy = REMEDIES.get(error.errno, f"fix this and run the same command again; {DEBUG}=1 shows where it happened")
    return f"{place + ': ' if place else ''}{reason}; {remedy}"


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # errors of a stream carry no path
        _point_at_null(sys.stdout)
        raise OSError(error.errno, error.strerror, "stdout") from error


def _report(error: BaseException) -> str:
    """Write the details file of an unexpected error, and return what to tell the user about it."""
    blame = (
        "its input is nested too deeply, or this is a bug in loopformers"
        if isinstance(error, RecursionError)
        else "this is a bug in loopformers"
    )
    try:
        handle, path = tempfile.mkstemp(prefix="loopformers-error-", suffix=".txt")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([*_circumstances(), "", *traceback.format_exception(error)]))
    except OSError as failure:
        reason = failure.strerror or first_line(failure)
        return f"{blame}: report it with the traceback that {DEBUG}=1 shows (no details file: {reason})"
    return f"{blame}: report it with the details in {path}"


def _circumstances() -> list[str]:
    lines = [f"command: {' '.join(_without_private_values(sys.argv))}", f"python {platform.python_version()}"]
    lines += [platform.platform(), f"locale: {sys.getfilesystemencoding()}, {getattr(sys.stdout, 'encoding', None)}"]
    for name in ("loopformers", *PACKAGES):
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name}: not installed")
    return lines


def _without_private_values(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        is_private = name.startswith("--") and any(word in name.lower() for word in PRIVATE_OPTIONS)
        kept.append("..." if hide_next else name + "=..." if is_private and equals else argument)
        hide_next = is_private and not equals
    return kept


def _say(text: str) -> None:
    sys.stderr.write(one_line(text) + "\n")
    sys.stderr.flush()


# -- streams -----------------------------------------------------------------------------------------------------


def _prepare_streams() -> None:
    """Make stdout and stderr take any text, whatever the locale, and fill the places of streams that are closed.

    A character that the locale's encoding lacks is written as its escape (`\\xe9`).

    Raises:
        ConfigError: stdout is closed.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file that is opened would get its number, and everyone's messages
            os.dup2(os.open(os.devnull, mode), descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  lives as long as the process
    if sys.stdout is None:
        raise ConfigError("stdout is closed, but results are printed there; leave it open, or redirect it to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _leave_pipes() -> int:
    """Let the interpreter end quietly: it flushes both streams once more on its way out, and must find them open."""
    _point_at_null(sys.stdout)
    try:
        sys.stderr.flush()
    except OSError:
        _point_at_null(sys.stderr)
    return BROKEN_PIPE


def _point_at_null(stream: object) -> None:
    try:
        descriptor = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):  # no stream of the system
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
