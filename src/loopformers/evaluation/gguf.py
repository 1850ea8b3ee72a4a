"""A look at the head of a GGUF file before a library reads it: does every length in it fit into the file?

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) states counts and lengths in 64 bits. Readers believe
them: a damaged or hostile count of 2^60 keeps them busy for ever, and a truncated file gives tensors of other bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from loopformers.errors import CheckpointError

__all__ = ["check_gguf"]

MAGIC = b"GGUF"
SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type."""
STRING, ARRAY = 8, 9
MAX_NESTING = 4
"""Of arrays in arrays."""
SMALLEST_TENSOR = 32
"""Bytes that the description of a tensor takes at least: name, dimensions, type, offset."""


def check_gguf(path: Path) -> None:
    """Check the head of a file.

    Raises:
        CheckpointError: It is no GGUF file, or states more than it holds.
    """
    try:
        with path.open("rb") as file:
            _Head(file, path).check()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); give a GGUF file") from error


class _Head:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.size = file, path, path.stat().st_size

    def check(self) -> None:
        if self.file.read(4) != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file (its first bytes are not GGUF); give another file")
        (version,) = self._unpack("<I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path} is a GGUF file of version {version}, but only versions 2 and 3 can be read; convert it again"
            )
        num_tensors, num_entries = self._unpack("<QQ")
        if num_tensors * SMALLEST_TENSOR > self.size or num_entries * 12 > self.size:
            self._refuse(f"{num_tensors} tensors and {num_entries} entries")
        for _ in range(num_entries):
            self._skip_string()
            (kind,) = self._unpack("<I")
            self._skip_value(kind, 0)

    def _skip_value(self, kind: int, depth: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY and depth < MAX_NESTING:
            kind, count = self._unpack("<IQ")
            if kind in SCALAR_SIZES:
                self._skip(count * SCALAR_SIZES[kind])
                return
            if count * 8 > self.size:
                self._refuse(f"an array of {count} values")
            for _ in range(count):
                self._skip_value(kind, depth + 1)
        elif kind in SCALAR_SIZES:
            self._skip(SCALAR_SIZES[kind])
        else:
            raise CheckpointError(
                f"{self.path} contains a value of the unknown type {kind}, so it is damaged; fetch it again"
            )

    def _skip_string(self) -> None:
        (length,) = self._unpack("<Q")
        self._skip(length)

    def _skip(self, length: int) -> None:
        if self.file.tell() + length > self.size:
            self._refuse(f"a value of {length} bytes")
        self.file.seek(length, 1)

    def _unpack(self, form: str) -> tuple[int, ...]:
        content = self.file.read(struct.calcsize(form))
        if len(content) < struct.calcsize(form):
            self._refuse("more entries")
        return struct.unpack(form, content)

    def _refuse(self, what: str) -> None:
        raise CheckpointError(
            f"{self.path} claims {what}, which its {self.size:,} bytes cannot hold, so it is truncated or damaged; fetch it again"
        )
