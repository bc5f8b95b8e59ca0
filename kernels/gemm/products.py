"""Products in C, a library for each kind of weight: compiled once for all operators that multiply, and only
for an engine that has such weights. Knows kinds; an operator's own library is given a product's address.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from hybridserve.kernels.registry import Capabilities

    Load = Callable[[Path, Mapping[str, Sequence[type[Any]]]], ctypes.CDLL]

_FOLDER = Path(__file__).resolve().parent

_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
}
"""Of products with weights of these elements; the source and the function in it are called so."""

_WHOLE = "whole"
"""The one of int8 codes with rows in whole numbers."""

_TYPES = (native.POINTER, native.INT, native.INT, native.POINTER, native.INT, native.INT, native.POINTER)
"""weights.h's `product`; never called from here."""


class Products:
    """Their addresses, by kind of weight. A library that is not there yet is built when it is asked for."""

    def __init__(self, load: Load = native.load) -> None:
        self._load = load
        self._addresses: dict[str, int] = {}

    def of(self, dtype: torch.dtype, *, limited: bool) -> int:
        """That with weights of this dtype; `limited`: with rows in whole numbers. RuntimeError if there can't
        be one."""
        name = _WHOLE if limited else _NAMES[dtype]
        address = self._addresses.get(name)
        if address is None:
            function = f"multiply_{name}"
            library = self._load(_source(name), {function: _TYPES})
            address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
            assert address is not None
            self._addresses[name] = address
        return address


def sources(capabilities: Capabilities, *, rounds: bool) -> tuple[Path, ...]:
    """What an engine's products are built from; `rounds`: rows that meet int8 codes are rounded to whole
    numbers, also where the format doesn't ask for it."""
    names = {
        "float32": "float32",
        "bfloat16": "bfloat16",
        "int8": _WHOLE if rounds else "int8",
        "int8-w8a8": _WHOLE,
        "fp8": "float8",
    }
    kinds = (capabilities.dtype, capabilities.weights)
    return tuple(_source(names[kind]) for kind in kinds if kind in names)


def _source(name: str) -> Path:
    return _FOLDER / f"{name}.c"
