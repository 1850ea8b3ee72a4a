"""Folders that one process owns at a time: a run's, a study's, a folder of results.

The owner holds a lock on a hidden file of the folder. The kernel releases it however the process ends, so a crash blocks
nobody; the file names the owner for those who are refused. Where a file system has no such locks, a file with the owner's
process number and host takes their place, and is replaced once that process no longer runs.

What a killed owner left half-written has names that nobody else uses; the next owner removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loopformers.errors import ConfigError, LoopformersError
from loopformers.files import PARTIAL, write_whole, writing
from loopformers.readers import parse_json, read_json

__all__ = ["ASIDE", "check_free", "foreign_names", "owned", "sweep", "write_together"]

ASIDE = ".partial"
"""Folder in an owned folder for what is written file by file, and for what is about to be deleted."""

LOCK_FILE = ".loopformers.lock"
OWNER_FILE = ".loopformers.owner"
"""Stands for the lock where the file system has none."""
JOURNAL = ".loopformers.unfinished"
"""Names the files of a result that is being put into place."""

PROBE = re.compile(r"\.probe-[0-9a-f]{32}")

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
"""What file systems without locks answer."""

SECONDS_TO_SIGN = 10.0
"""After which a file that names no owner is a crashed start's, and no longer one that is being written."""


@dataclass(slots=True)
class _Held:
    """A folder that this process owns."""

    file: Path
    descriptor: int | None
    thread: int


_held: dict[str, _Held] = {}


def _forget_in_child() -> None:
    """A forked child shares its parent's locks; without this it would keep them when the parent has ended."""
    for held in _held.values():
        if held.descriptor is not None:
            os.close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def owned(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Own a folder inside the block; make it if there is none, and remove it again if it is still empty at the end.

    What a killed owner left half-written is removed first. The thread that owns a folder may enter again.

    Raises:
        ConfigError: Another process, or another thread, owns it; the text names it. Or the folder is a file.
        WriteError: The folder cannot be written.
    """
    place = Path(_resolved(folder))
    key = str(place)
    if key in _held and _held[key].thread == threading.get_ident():
        yield
        return
    with writing(folder):
        made = _make(place)
    try:
        with writing(folder):
            _held[key] = _take(place)
        try:
            sweep(place)
            yield
        finally:
            _release(_held.pop(key, None))
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it holds something now
                path.rmdir()


def check_free(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if another process owns a folder. Writes nothing."""
    place = Path(_resolved(folder))
    held = _held.get(str(place))
    if held is not None and held.thread == threading.get_ident():
        return
    try:
        descriptor = os.open(place / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no lock, or one that is not ours to try
        descriptor = None
    if descriptor is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(place, _owner_of(place / LOCK_FILE)) from None
        except OSError:  # no locks here
            pass
        finally:
            os.close(descriptor)
    if (place / OWNER_FILE).exists() and not _has_ended(place / OWNER_FILE):
        raise _in_use(place, _owner_of(place / OWNER_FILE), place / OWNER_FILE)


def foreign_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder other than those of locks and of what killed processes left half-written."""
    hidden = {LOCK_FILE, OWNER_FILE, JOURNAL, ASIDE}
    return sorted(name for name in os.listdir(folder) if name not in hidden and not _is_leftover(name))


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove what a killed owner of a folder left half-written in it; only its owner may call this."""
    place = Path(folder)
    if not place.is_dir():
        return
    with writing(place):
        for name in os.listdir(place):
            path = place / name
            if _is_leftover(name) and not path.is_dir():
                path.unlink(missing_ok=True)
        journal = place / JOURNAL
        if journal.exists():
            files = [place / name for name in _journal_names(journal)]
            is_whole = bool(files) and files[-1].is_file()
            for path in files if not is_whole else ():
                if path.is_file() or path.is_symlink():
                    path.unlink()
            journal.unlink()


def write_together(folder: str | os.PathLike[str], files: Mapping[str, str | bytes]) -> None:
    """Write the files of one result, of which none may be there yet. After a crash, the folder's next owner removes them.

    Args:
        folder: Owned by this process.
        files: Contents by name, in the order of writing; once the last one is there, the result is whole.

    Raises:
        WriteError: One cannot be written; none is left.
    """
    place = Path(folder)
    write_whole(place / JOURNAL, json.dumps(list(files)))
    try:
        for name, content in files.items():
            write_whole(place / name, content)
    except BaseException:
        with contextlib.suppress(LoopformersError):
            sweep(place)
        raise
    with writing(place / JOURNAL):
        (place / JOURNAL).unlink()


# -- taking and releasing ----------------------------------------------------------------------------------------


def _take(place: Path) -> _Held:
    file = place / LOCK_FILE
    while True:
        # A link in the place of the lock could point at a file that must not be written.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, file):  # else its last owner removed it between the two calls
                if (place / OWNER_FILE).exists() and not _has_ended(place / OWNER_FILE):
                    raise _in_use(place, _owner_of(place / OWNER_FILE), place / OWNER_FILE)
                _sign(descriptor)
                return _Held(file, descriptor, threading.get_ident())
        except BlockingIOError:
            os.close(descriptor)
            raise _in_use(place, _owner_of(file)) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in NO_LOCKS:
                raise
            file.unlink(missing_ok=True)
            return _take_by_name(place)
        except ConfigError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take_by_name(place: Path) -> _Held:
    file = place / OWNER_FILE
    while True:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            owner = _owner_of(file)
            if not _has_ended(file):
                raise _in_use(place, owner, file) from None
            aside = file.with_name(f".{file.name}.{uuid.uuid4().int}.partial")
            with contextlib.suppress(FileNotFoundError):  # another start was faster
                os.rename(file, aside)
                if _owner_of(aside) != owner:  # and has signed already: give its file back
                    os.rename(aside, file)
                aside.unlink(missing_ok=True)
            continue
        _sign(descriptor)
        os.close(descriptor)
        return _Held(file, None, threading.get_ident())


def _release(held: _Held | None) -> None:
    if held is None:  # in a forked child
        return
    if held.descriptor is None or _is_same_file(held.descriptor, held.file):
        with contextlib.suppress(OSError):  # the folder is gone, or may no longer be written
            held.file.unlink()
    if held.descriptor is not None:
        os.close(held.descriptor)


def _make(place: Path) -> list[Path]:
    """Make a folder and those above it; return the new ones, the deepest first."""
    missing = [path for path in (place, *place.parents) if not path.exists()]
    there = missing[-1].parent if missing else place
    if not there.is_dir():
        raise ConfigError(f"{str(there)!r} is a file; give a folder")
    place.mkdir(parents=True, exist_ok=True)
    return missing


def _is_same_file(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _resolved(folder: str | os.PathLike[str]) -> str:
    try:
        return os.path.realpath(folder)
    except FileNotFoundError as error:
        raise ConfigError("the working directory has been removed; change to one that exists") from error
    except ValueError as error:
        raise ConfigError(f"folder {os.fspath(folder)!r} is not a path ({error}); give another name") from error


def _is_leftover(name: str) -> bool:
    return bool(PARTIAL.fullmatch(name) or PROBE.fullmatch(name))


def _journal_names(journal: Path) -> list[str]:
    try:
        names = read_json(journal, list)
    except LoopformersError:  # never half-written, so somebody else's
        return []
    return [name for name in names if isinstance(name, str) and name and os.path.basename(name) == name]


# -- owners ------------------------------------------------------------------------------------------------------


def _sign(descriptor: int) -> None:
    command = " ".join([os.path.basename(sys.argv[0] if sys.argv else ""), *sys.argv[1:]]).strip()
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command[:300],
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _start_time(os.getpid()),
    }
    with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner_of(file: Path) -> dict[str, object] | None:
    try:
        owner = parse_json(file.read_bytes()[:10_000], dict, file)
    except (OSError, LoopformersError):
        return None
    return owner if isinstance(owner.get("pid"), int) and isinstance(owner.get("host"), str) else None


def _has_ended(file: Path) -> bool:
    """Whether the process that a file names no longer runs; that of another host cannot be told, and counts as running."""
    owner = _owner_of(file)
    if owner is None:
        with contextlib.suppress(OSError):
            return time.time() - file.stat().st_mtime > SECONDS_TO_SIGN
        return False
    pid = owner["pid"]
    assert isinstance(pid, int)
    if owner["host"] != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, as another user
        pass
    return owner.get("started") != _start_time(pid)


def _start_time(pid: int) -> str | None:
    """Return when a process started, as the kernel counts it: numbers of processes are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError, UnicodeDecodeError):
        return None


def _in_use(place: Path, owner: Mapping[str, object] | None, file: Path | None = None) -> ConfigError:
    who = "another process"
    if owner is not None:
        who = f"process {owner['pid']} on {owner['host']} since {owner.get('since')} ({owner.get('command')})"
    rest = "" if file is None else f", or remove {str(file)!r} if that process no longer runs"
    return ConfigError(f"{str(place)!r} is in use by {who}; wait for it to end, stop it, or give another folder{rest}")
