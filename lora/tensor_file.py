"""Reads a safetensors file that nobody vouches for: everything is checked before anything of its size is
allocated.

Read, not mapped: a file that shrinks under a mapping kills the process, and one that changes under it changes
an adapter in use. Knows the format (https://huggingface.co/docs/safetensors); knows no adapter.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hybridserve.lora.loader import no_pause

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO, Self

MAX_HEADER_BYTES = 2 << 20
"""Parsing holds up every other thread. A pair for every projection of 36 x 16 experts takes half of it."""
MAX_TENSORS = 16384
PAUSE_EVERY = 256  # entries
MAX_SHOWN = 160
MAX_DIGITS = 24
PREFIX_BYTES = 8
"""The length of the header, little-endian."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Entry(NamedTuple):
    """What the header says about one tensor."""

    dtype: str
    """As safetensors spells it, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte, from the beginning of the file."""
    num_bytes: int


class TensorFile:
    """One open file. Raises ValueError, naming it, for whatever is wrong with it, and OSError as `open` does.

    A context manager. `pause` is called between a few entries of the header and the next.

    entries: of all its tensors, by name. Dtypes other than `DTYPES` are listed, but can't be read.
    """

    def __init__(self, path: Path, pause: Callable[[], None] = no_pause) -> None:
        self.path = path
        self._pause = pause
        self.entries: dict[str, Entry] = {}
        if not path.is_file():
            raise ValueError(f"{path}: not a file")
        self._file: BinaryIO = path.open("rb")
        try:
            self._read_header(os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own."""
        entry = self.entries[name]
        return self._read(name, entry.start, entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a matrix, in memory of their own."""
        entry = self.entries[name]
        width = math.prod(entry.shape[1:])
        num_bytes = width * DTYPES[entry.dtype].itemsize
        return self._read(name, entry.start + start * num_bytes, (stop - start, *entry.shape[1:]))

    def _read(self, name: str, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=DTYPES[self.entries[name].dtype])
        if not tensor.numel():
            return tensor
        buffer = tensor.view(-1).view(torch.uint8).numpy()
        self._file.seek(start)
        if self._file.readinto(buffer) != buffer.nbytes:  # type: ignore[attr-defined]
            raise ValueError(f"{self.path}: cut short while it was read, at {shown(name)}")
        return tensor

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._file.read(PREFIX_BYTES), "little")
        start = PREFIX_BYTES + length
        if size < PREFIX_BYTES or start > size:
            raise ValueError(f"{self.path}: cut short, or not a safetensors file ({size} bytes)")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{self.path}: a header of {length} bytes, and the limit is {MAX_HEADER_BYTES}")
        self._pause()
        header = parse_json(self.path, self._file.read(length))
        self._pause()
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise ValueError(f"{self.path}: {len(header)} tensors, and the limit is {MAX_TENSORS}")
        for index, (name, value) in enumerate(header.items()):
            if index % PAUSE_EVERY == 0:
                self._pause()
            self.entries[name] = self._entry(name, value, start)
        end = start
        in_order = sorted(self.entries.items(), key=lambda item: item[1].start)
        for index, (name, entry) in enumerate(in_order):
            if index % PAUSE_EVERY == 0:
                self._pause()
            if entry.start != end:
                raise ValueError(
                    f"{self.path}: the tensor {shown(name)} does not begin where the last one ends"
                )
            end += entry.num_bytes
        if end != size:
            what = "cut short" if end > size else "more bytes than tensors"
            raise ValueError(f"{self.path}: {what}: {size} bytes, and the header speaks of {end}")

    def _entry(self, name: str, value: Any, start: int) -> Entry:
        match value:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if (
                all(type(n) is int and n >= 0 for n in shape) and 0 <= first <= last
            ):
                num_bytes = last - first
            case _:
                raise ValueError(f"{self.path}: the header's entry for {shown(name)} makes no sense")
        if dtype in DTYPES and num_bytes != math.prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(
                f"{self.path}: {shown(name)} has {num_bytes} bytes, which does not fit its shape"
            )
        return Entry(dtype, tuple(shape), start + first, num_bytes)


def shown(value: object) -> str:
    """Something out of a file for an error message: one line, and not long, whatever it is."""
    text = repr(value)
    if type(value) is int and len(text) > MAX_DIGITS:
        return f"a number of {len(text.lstrip('-'))} digits"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    """The object that the text is. Raises ValueError, naming the file: also for a key that occurs twice in an
    object, of which one value would be ignored."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{shown(twice)} occurs twice")
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError(f"{path}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # of the syntax, of the encoding and of `unique`
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value
