"""Reads tensors from a safetensors file, one at a time.

The official library maps a file into memory, and pages that have been read count as this process's until the
file is closed. Reading into the tensor keeps the peak at one tensor. Knows the format, not what the tensors
are for.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self, cast

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Buffer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
MAX_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """One open file; a context manager. Raises ValueError, if it is cut short or isn't safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: torch.Tensor | None = None
        self._file: BinaryIO = path.open("rb", buffering=0)
        try:
            self.entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, until the next one is read: all are read into the same memory."""
        dtype, shape, start, num_bytes = self.entries[name]
        if self._memory is None:
            self._memory = torch.empty(max(e.num_bytes for e in self.entries.values()), dtype=torch.uint8)
        memory = self._memory[:num_bytes]
        view = memoryview(cast("Buffer", memory.numpy()))
        self._file.seek(start)
        done = 0
        while done < num_bytes:
            # One call reads at most 2 GiB.
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{self.path}: cut short: the end of {name!r} is missing")
            done += count
        return memory.view(dtype).view(shape)

    def _read_header(self) -> dict[str, Entry]:
        size = self.path.stat().st_size
        prefix = self._file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER_BYTES:
            raise ValueError(f"{self.path}: not a safetensors file")
        if 8 + length > size:
            raise ValueError(f"{self.path}: cut short or not a safetensors file: its header alone is longer")
        try:
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            return {name: self._entry(name, info, 8 + length, size) for name, info in header.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError):
            raise ValueError(f"{self.path}: not a safetensors file: its header can't be read") from None

    def _entry(self, name: str, info: dict[str, Any], base: int, size: int) -> Entry:
        if info["dtype"] not in DTYPES:
            raise ValueError(f"{self.path}: {name!r} has the dtype {info['dtype']}, which is not supported")
        dtype, shape = DTYPES[info["dtype"]], tuple(cast("list[int]", info["shape"]))
        start, end = info["data_offsets"]
        if start < 0 or end - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{self.path}: {name!r} does not fill its place in the file")
        if base + end > size:
            raise ValueError(
                f"{self.path}: cut short: {name!r} ends {base + end - size} bytes after the file"
            )
        return Entry(dtype, shape, base + start, end - start)
