"""Reads tensors from a safetensors file, one at a time, through the safetensors library.

The library maps a file into memory, and pages that were read count as this process's while the file is open.
Opening it for each tensor keeps the peak at one tensor. Knows files, not what the tensors are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Entry(NamedTuple):
    """What a file says about one tensor; `dtype` as safetensors spells it, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


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

    def read(self, name: str) -> torch.Tensor:
        """The tensor, as a view of the file that lasts as long as it."""
        with safe_open(self.path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
