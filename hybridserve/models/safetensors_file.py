"""Reads tensors from a safetensors file, and writes them to one, one at a time.

Reading is the library's. It maps a file into memory, and pages that were read count as this process's while
the file is open. Opening it for each tensor keeps the peak at one tensor. The library writes only what is all
in memory at once, so writing is done here. Knows files, not what the tensors are for.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType


DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""By how safetensors spells them."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class Entry(NamedTuple):
    """What a file says about one tensor; `dtype` as safetensors spells it, such as BF16."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsFile:
    """One file. Raises ValueError, naming it, if it is cut short or isn't safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        """By name, in the order of the file, so that going through them reads it from front to back."""
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    part = file.get_slice(name)
                    self.entries[name] = Entry(part.get_dtype(), tuple(part.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{path}: cut short, or not a safetensors file ({error})") from None
        self._check_names()

    def _check_names(self) -> None:
        """Of two tensors with one name the library takes the last, and others the first: the file would be
        two models."""
        with self.path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        json.loads(header, object_pairs_hook=self._once)

    def _once(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{self.path}: {twice[:200]!r} occurs twice in the header")
        return entries

    def read(self, name: str) -> torch.Tensor:
        """The tensor, as a view of the file that lasts as long as it."""
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def outline(self, name: str) -> torch.Tensor:
        """Its shape and dtype on the meta device; nothing is read."""
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


class SafetensorsWriter:
    """A file whose tensors are known before any of them is written; they may then come in any order."""

    def __init__(self, path: Path, entries: Mapping[str, Entry]) -> None:
        """Larger elements first, so that each tensor is aligned."""
        self.entries = dict(entries)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(entries, key=lambda name: (-ITEM_BYTES[entries[name].dtype], name)):
            entry, start = entries[name], end
            end = start + entry.num_bytes
            self._offsets[name] = start
            header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._first = 8 + len(text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Each name once, with the dtype and shape that were said."""
        data = tensor.contiguous().flatten().view(torch.uint8)
        entry, offset = self.entries[name], self._offsets.pop(name)
        if tuple(tensor.shape) != tuple(entry.shape) or data.nbytes != entry.num_bytes:
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not what was announced")
        self._file.seek(self._first + offset)
        self._file.write(data.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None and self._offsets:
            raise ValueError(f"{next(iter(self._offsets))}: was announced and not written")
