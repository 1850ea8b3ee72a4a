from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from loopformers import folders
from loopformers.errors import ConfigError, LoopformersError, WriteError
from loopformers.files import write_whole, writing
from loopformers.folders import check_free, foreign_names, owned, sweep, write_together
from tests.children import KILLED, killed_at_rename

OWN_AND_WAIT = """
import sys
from loopformers.folders import owned
with owned(sys.argv[1]):
    print("owned", flush=True)
    sys.stdin.readline()
"""


def other_owner(folder: Path) -> subprocess.Popen[str]:
    """Start a process that owns a folder until it is told to end, or killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_AND_WAIT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as some network file systems do."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", flock)


def test_a_second_process_is_refused_with_the_owners_name_and_a_crash_blocks_nobody(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = other_owner(run)
    named = rf"is in use by process {process.pid} on {socket.gethostname()} since .* \(-c .*run\); wait for it to end"
    with pytest.raises(ConfigError, match=named), owned(run):
        pytest.fail("two owners")
    with pytest.raises(ConfigError, match=named):
        check_free(run)
    process.kill()
    process.communicate()
    assert (run / folders.LOCK_FILE).exists(), "the killed owner's file stays"
    check_free(run)
    with owned(run):
        (run / "kept").touch()
    assert os.listdir(run) == ["kept"]


def test_a_folder_that_stays_empty_is_removed_and_others_are_left(tmp_path: Path) -> None:
    with owned(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with owned(tmp_path / "mine"):
        pass
    assert os.listdir(tmp_path) == ["mine"]


def test_the_owning_thread_may_enter_again_and_another_may_not(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def enter() -> None:
        try:
            with owned(tmp_path):
                pass
        except ConfigError as error:
            refused.append(error)

    with owned(tmp_path):
        with owned(os.path.relpath(tmp_path)):
            pass
        check_free(tmp_path)
        other = threading.Thread(target=enter)
        other.start()
        other.join()
        with pytest.raises(OSError, match="temporarily unavailable"):  # still locked after the inner block
            fcntl.flock(os.open(tmp_path / folders.LOCK_FILE, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert f"in use by process {os.getpid()} " in str(refused[0])


def test_children_do_not_keep_the_lock_of_their_parent(tmp_path: Path) -> None:
    with owned(tmp_path):
        started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        ready, told = os.pipe()
        forked = os.fork()
        if not forked:
            os.close(told)
            os.read(ready, 1)
            os._exit(0)
        os.close(ready)
    with owned(tmp_path):
        pass
    os.close(told)
    os.waitpid(forked, 0)
    started.communicate(b"\n")


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folders.LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(WriteError, match="run' cannot be written"), owned(tmp_path / "run"):
        pytest.fail("locked a link")
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_is_not_a_folder_and_a_missing_working_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="file' is a file; give a folder"), owned(place):
            pytest.fail("owned a file")
    with pytest.raises(ConfigError, match="is not a path"), owned("nul\0"):
        pytest.fail("owned a name with NUL")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="working directory has been removed"), owned("run"):
        pytest.fail("owned nothing")
    with pytest.raises(LoopformersError, match="run/x' cannot be written"):
        write_whole("run/x", "text")


# -- file systems without locks ----------------------------------------------------------------------------------


def sign(folder: Path, **owner: Any) -> None:
    folder.mkdir(exist_ok=True)
    own = {"pid": os.getpid(), "host": socket.gethostname(), "command": "loopformers train", "since": "yesterday"}
    started = folders._start_time(int(owner.get("pid", os.getpid())))
    (folder / folders.OWNER_FILE).write_text(json.dumps({**own, "started": started, **owner}))


def test_without_locks_a_file_names_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    with owned(tmp_path / "run"):
        assert os.listdir(tmp_path / "run") == [folders.OWNER_FILE]
        assert foreign_names(tmp_path / "run") == []
        owner = json.loads((tmp_path / "run" / folders.OWNER_FILE).read_text())
        assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{}, {"host": "elsewhere", "pid": 1}, {"pid": os.getppid()}])
def test_without_locks_a_running_owner_and_one_of_another_host_are_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    sign(tmp_path / "run", **change)
    with pytest.raises(ConfigError, match=r"in use by process .* \(loopformers train\)"), owned(tmp_path / "run"):
        pytest.fail("an owner whose file system has locks here")
    without_locks(monkeypatch)
    with pytest.raises(ConfigError, match=r"in use by process .*or remove '.*owner' if that process no longer runs"):
        check_free(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by process"), owned(tmp_path / "run"):
        pytest.fail("two owners")
    assert os.listdir(tmp_path / "run") == [folders.OWNER_FILE]


@pytest.mark.parametrize("change", [{"pid": 2**22 + 7}, {"started": "1"}, {"pid": 10**30}])
def test_without_locks_a_crashed_owner_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    without_locks(monkeypatch)
    monkeypatch.setattr(folders, "_start_time", lambda pid: "123")
    sign(tmp_path, **change)
    check_free(tmp_path)
    with owned(tmp_path):
        assert json.loads((tmp_path / folders.OWNER_FILE).read_text())["started"] == "123"
    assert os.listdir(tmp_path) == []


def test_without_locks_an_unsigned_file_counts_for_a_few_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    file = tmp_path / folders.OWNER_FILE
    file.touch()
    with pytest.raises(ConfigError, match="in use by another process"), owned(tmp_path):
        pytest.fail("two owners")
    os.utime(file, (0, 0))
    with owned(tmp_path):
        pass
    assert not file.exists()


# -- what killed owners leave ------------------------------------------------------------------------------------


def test_only_what_a_killed_owner_left_is_swept(tmp_path: Path) -> None:
    ours = [".recipe.yaml.1.partial", ".table.md.99.partial", f".probe-{'0' * 32}"]
    others = [".notes.partial", "a.1.partial", ".probe-mine", "thesis.tex"]
    for name in (*ours, *others):
        (tmp_path / name).touch()
    (tmp_path / ".dir.1.partial").mkdir()
    assert foreign_names(tmp_path) == sorted(others)
    with owned(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted([*others, ".dir.1.partial"])


FILES = {"a.csv": "1,2\n", "a.svg": "<svg/>", "a.json": "{}"}


@pytest.mark.parametrize("kill", [1, 2, 3, 4])
def test_a_result_that_is_cut_off_at_any_rename_is_cleaned_by_the_next_owner(tmp_path: Path, kill: int) -> None:
    """The first rename puts the journal into place, the others a file each."""
    (tmp_path / "notes.txt").touch()

    def write() -> None:
        with owned(tmp_path):
            write_together(tmp_path, FILES)

    assert killed_at_rename(kill, write) == KILLED
    assert len(os.listdir(tmp_path)) > 1
    assert not (tmp_path / "a.json").exists()
    with owned(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [folders.LOCK_FILE, "notes.txt"]
        write_together(tmp_path, FILES)
    assert sorted(os.listdir(tmp_path)) == [*sorted(FILES), "notes.txt"]


def test_a_result_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    with owned(tmp_path), pytest.raises(WriteError, match="b' cannot be written"):
        write_together(tmp_path, {"a": "1", "b": "2"})
    assert os.listdir(tmp_path) == ["b"]


def test_a_foreign_journal_removes_nothing_outside_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").touch()
    for text in ('["../precious", "", ".", 3]', "not json", "{}"):
        (tmp_path / "run" / folders.JOURNAL).write_text(text)
        sweep(tmp_path / "run")
    assert (tmp_path / "precious").exists()
    assert os.listdir(tmp_path / "run") == []


def test_a_whole_result_whose_journal_stayed_is_kept(tmp_path: Path) -> None:
    write_together(tmp_path, FILES)
    (tmp_path / folders.JOURNAL).write_text(json.dumps(list(FILES)))
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


# -- errors of writing -------------------------------------------------------------------------------------------


def test_an_error_of_writing_names_the_path_and_leaves_the_old_file(tmp_path: Path) -> None:
    with (
        pytest.raises(
            WriteError, match=r"/dev/full' cannot be written \(No space left on device\); free some space"
        ) as full,
        writing("/dev/full"),
        open("/dev/full", "w") as file,
    ):
        file.write("x")
    assert (full.value.errno, full.value.strerror) == (errno.ENOSPC, "No space left on device")
    assert isinstance(full.value, OSError)
    (tmp_path / "file").write_text("old")
    with pytest.raises(WriteError, match=r"file/below' cannot be written"):
        write_whole(tmp_path / "file" / "below", "new")
    (tmp_path / "file").chmod(0o600)
    with pytest.raises(WriteError, match="name too long"):
        write_whole(tmp_path / ("x" * 300), "new")
    with pytest.raises(ZeroDivisionError), writing("x"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["file"]
