"""Where documents are found: the bundled corpus, files and folders. What reads them is `loopformers.data.documents`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from loopformers.errors import DataError, unknown_name

__all__ = ["BUNDLED", "BUNDLED_CORPORA", "DATASET_NAME", "SourceFile", "find_files", "is_bundled", "kind_of"]

BUNDLED = "bundled"
"""The source name of the corpus that ships with this package; reserved: write `./bundled` for a folder of that name."""

BUNDLED_DIR = Path(__file__).parent / "bundled"

BUNDLED_CORPORA = ("austen", "moby-dick", "sotu")
"""Its parts, each a source of its own: `bundled/austen`."""

KIND_OF_SUFFIX = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""How a file is read, by its suffix."""

COMPRESSIONS = (".gz", ".xz", ".bz2", ".zst")
"""What text and JSON files may be compressed with."""

SUFFIXES = f"{', '.join(KIND_OF_SUFFIX)} (text and JSON also compressed: {', '.join(COMPRESSIONS)})"

SAVED_DATASET_FILES = frozenset({"dataset_dict.json", "dataset_info.json", "state.json"})
"""What `Dataset.save_to_disk` writes beside its Arrow files; it describes them and holds no documents."""

DATASET_NAME = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(:(?P<config>[^/\\]+))?")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: Where it is.
        name: Its path below the source, with forward slashes: the id of a text file.
        kind: "text", "json", "parquet" or "arrow".
    """

    path: Path
    name: str
    kind: str

    def __str__(self) -> str:
        return f"file {str(self.path)!r}"


def find_files(source: str | os.PathLike[str]) -> list[SourceFile] | None:
    """Return the files of a source in the order of their paths, or None where it is not a path that exists.

    Folders are searched recursively; hidden files, README.md and files with other suffixes are left out.

    Raises:
        DataError: Not a source at all, an unknown part of the bundled corpus, a file with an unknown suffix or one that is
            not a regular file, or a folder that cannot be listed or holds nothing that can be read.
    """
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise DataError(
            f"source={source!r} is neither a path nor a name; give {BUNDLED!r}, a file, a folder or a dataset's name"
        )
    if is_bundled(source):
        return _source_files(_bundled_files(str(source).partition("/")[2]), BUNDLED_DIR)
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _source_files(_files_under(path), path)
        if not path.exists() and not path.is_symlink():
            return None
    except (OSError, ValueError) as error:  # a name too long, a NUL in it, a folder above it that is closed to us
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"source={str(source)!r} cannot be opened ({reason}); check the path") from error
    return _source_files([path], path.parent)


def is_bundled(source: str | os.PathLike[str]) -> bool:
    """Whether a source is the bundled corpus or a part of it."""
    return isinstance(source, str) and source.partition("/")[0] == BUNDLED


def kind_of(path: Path) -> str | None:
    """How a file is read, or None when its suffix is not known."""
    compressed = path.suffix.lower() in COMPRESSIONS
    kind = KIND_OF_SUFFIX.get((path.with_suffix("") if compressed else path).suffix.lower())
    return None if compressed and kind in ("parquet", "arrow") else kind


def _source_files(paths: list[Path], root: Path) -> list[SourceFile]:
    return [SourceFile(path, _readable(path.relative_to(root)), _known_kind(path)) for path in paths]


def _readable(path: Path) -> str:
    """A path as text; bytes of its name that are not UTF-8 as escapes."""
    return path.as_posix().encode("utf-8", "backslashreplace").decode()


def _known_kind(path: Path) -> str:
    kind = kind_of(path)
    if kind is None:
        raise DataError(
            f"file {str(path)!r} has an unknown suffix; files that can be read end in {SUFFIXES}; "
            "rename a plain text file to end in .txt"
        )
    return kind


def _bundled_files(part: str) -> list[Path]:
    if part and part not in BUNDLED_CORPORA:
        raise DataError(unknown_name("source", f"{BUNDLED}/{part}", (f"{BUNDLED}/{name}" for name in BUNDLED_CORPORA)))
    return [BUNDLED_DIR / f"{name}.jsonl.xz" for name in ([part] if part else BUNDLED_CORPORA)]


def _files_under(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"folder {error.filename!r} cannot be listed ({error.strerror}); check its permissions, or move it elsewhere"
        ) from error

    found: list[Path] = []
    for root, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        beside_arrow = any(name.endswith(".arrow") for name in names) or "dataset_dict.json" in names
        left_out = {"README.md", *(SAVED_DATASET_FILES if beside_arrow else ())}
        paths = (Path(root, name) for name in names if not name.startswith(".") and name not in left_out)
        found += [path for path in paths if kind_of(path) and path.is_file()]
    if not found:
        raise DataError(
            f"folder {str(folder)!r} contains no file that can be read; files that can be read end in {SUFFIXES}; "
            "rename the files or give another folder"
        )
    return sorted(found)
