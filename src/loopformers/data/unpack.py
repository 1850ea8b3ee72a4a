"""The bytes of a file, decompressed on the way, with one error for everything that can be wrong with them.

Nothing is unpacked to disk or kept in memory. A file that grows beyond reason while it is unpacked is refused.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from loopformers.errors import DataError, first_line

__all__ = ["MAX_EXPANSION", "not_utf8", "open_unpacked", "reading", "regular_size"]

MAX_EXPANSION = 200
"""How many times its own size a compressed file may grow. Prose grows 3 to 6 times, logs perhaps 30 times."""

ALWAYS_UNPACKED = 1 << 26
"""Bytes up to which a compressed file may grow in any case."""

BUFFER = 1 << 18


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system, decompressors and parsers of Arrow raise while they read a file into a DataError.

    Raises:
        DataError: The file is gone, may not be read, or is damaged; names it and the cause.
    """
    name = f"file {str(path)!r}"
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist, or was removed while it was being read; check the path") from error
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(name, error) from error
    except OSError as error:
        if error.errno is None:  # bz2 and Arrow say so of damaged data
            raise _damaged(name, error) from error
        raise DataError(
            f"{name} cannot be read ({os.strerror(error.errno)}); check its permissions and the disk"
        ) from error


def _damaged(name: str, error: BaseException) -> DataError:
    return DataError(f"{name} is damaged or incomplete ({first_line(error)}); fetch or write it again")


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """The error for text in another encoding.

    Args:
        where: File and line or column, with a comma behind it.
        error: Names the byte.
    """
    return DataError(
        f"{where} is not UTF-8 text (byte 0x{error.object[error.start]:02x}), and text must be UTF-8; convert the file, for "
        "example with iconv -f LATIN1 -t UTF-8"
    )


def regular_size(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        DataError: It is missing, or a device, a pipe or a socket, whose end may never come.
    """
    with reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError(
            f"file {str(path)!r} is not a regular file but a pipe, a device or a folder; copy the text into a file"
        )
    return found.st_size


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open the decompressed bytes of a file, as its suffix says (.gz, .xz, .bz2, .zst, or none of them).

    Raises:
        DataError: See `reading` and `regular_size`; or, while reading, the file grows beyond `MAX_EXPANSION`.
    """
    size = regular_size(path)
    with reading(path), path.open("rb") as packed:
        unpacked = _decompressor(path.suffix.lower(), packed)
        if unpacked is None:
            yield packed
        else:
            with unpacked, io.BufferedReader(_Limited(unpacked, path, size), BUFFER) as limited:
                yield limited


def _decompressor(suffix: str, packed: BinaryIO) -> Any:
    """A file object with `read`, or None for a file that is not compressed."""
    match suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=packed)
        case ".xz":
            return lzma.LZMAFile(packed)
        case ".bz2":
            return bz2.BZ2File(packed)
        case ".zst":
            return pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), "zstd")
    return None


class _Limited(io.RawIOBase):
    """Decompressed bytes, counted."""

    def __init__(self, unpacked: Any, path: Path, size: int) -> None:
        self.unpacked, self.path, self.size, self.count = unpacked, path, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.unpacked.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        if self.count > max(ALWAYS_UNPACKED, MAX_EXPANSION * self.size):
            raise DataError(
                f"file {str(self.path)!r} grows to more than {MAX_EXPANSION} times its {self.size:,} bytes when decompressed, "
                "which real text does not; if it is correct, decompress it yourself and give the result"
            )
        return len(data)
