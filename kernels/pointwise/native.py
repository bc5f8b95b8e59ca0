"""Norms, SwiGLU and draws in C, for CPUs, and the other operators on rows as torch has them. Knows how to
hand tensors over; the arithmetic is in `native.c` and `draw.h`.

A row's result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.native import INT, KINDS, POINTER
from hybridserve.kernels.pointwise.torch_native import TorchNative

if TYPE_CHECKING:
    from hybridserve.kernels.registry import Capabilities

SOURCE = Path(__file__).resolve().with_name("native.c")

DRAW_BLOCK = 256
"""draw.h's BLOCK."""

FUNCTIONS = {
    "rms_norm": (
        *(POINTER, INT, INT, POINTER, INT, POINTER, INT),  # x, what is added to it, weight
        *(POINTER, INT, INT, INT, ctypes.c_double),  # segments, rows, size of a row, eps
        *(POINTER, INT),
    ),
    "silu_and_mul": (POINTER, INT, INT, INT, INT, POINTER, INT),
    "argmax": (POINTER, INT, INT, INT, POINTER, POINTER, INT),
    "draw": (
        *(POINTER, INT, INT, POINTER, INT),  # logits, rows
        *(POINTER, POINTER, POINTER, POINTER, POINTER),  # how each is drawn
        *(POINTER, POINTER, INT),
    ),
}
"""What native.c has, by the types of arguments."""


class Native(TorchNative):
    """RuntimeError where there is no library: ask `why_not` first."""

    name = "native"
    depends_on_threads = False
    can_be_recorded = True

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cpu":
            return "runs on CPUs only"
        return native.obstacle(*cls.sources(capabilities))

    @classmethod
    def sources(cls, capabilities: Capabilities) -> tuple[Path, ...]:
        return (SOURCE,)

    def __init__(self) -> None:
        super().__init__()
        self._library = native.load(SOURCE, FUNCTIONS)
        self._scratch = torch.empty(0)
        """Of draws, which are made by one thread at a time and not recorded."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        return self._norm(x if x.stride(1) == 1 else x.contiguous(), None, weight, eps, sizes)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x.stride(1) != 1 or residual.stride(1) != 1 or residual.dtype is not x.dtype:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps, (x.shape[1],))

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        sizes: tuple[int, ...],
    ) -> torch.Tensor:
        if not weight.is_contiguous():
            weight = weight.contiguous()
        num_rows, row_size = x.shape
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._library.rms_norm(
            x.data_ptr(),
            x.stride(0),
            KINDS[x.dtype],
            None if residual is None else residual.data_ptr(),
            0 if residual is None else residual.stride(0),
            weight.data_ptr(),
            KINDS[weight.dtype],
            _int64_array(sizes),
            len(sizes),
            num_rows,
            row_size,
            eps,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.stride(1) != 1:
            gate_up = gate_up.contiguous()
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        y = gate_up.new_empty(num_rows, size)
        self._library.silu_and_mul(
            gate_up.data_ptr(),
            gate_up.stride(0),
            KINDS[gate_up.dtype],
            num_rows,
            size,
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    def argmax(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = _float32_rows(logits)
        num_rows, size = logits.shape
        places = torch.empty(num_rows, dtype=torch.int64)
        finite = torch.empty(num_rows, dtype=torch.bool)
        self._library.argmax(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            size,
            places.data_ptr(),
            finite.data_ptr(),
            torch.get_num_threads(),
        )
        return places, finite

    def draw(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        temperature: torch.Tensor,
        uniform: torch.Tensor,
        *,
        min_p: torch.Tensor | None = None,
        top_k: torch.Tensor | None = None,
        top_p: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Exponentials are within 2 units in the last place and are not divided by their sum; the sums that
        decide what is kept are float64's."""
        logits = _float32_rows(logits)
        rows, uniform = _column(rows, torch.int64), _column(uniform, torch.float64)
        temperature = _column(temperature, torch.float32)
        min_p = None if min_p is None else _column(min_p, torch.float32)
        top_k = None if top_k is None else _column(top_k, torch.int64)
        top_p = None if top_p is None else _column(top_p, torch.float32)
        num_threads, size = torch.get_num_threads(), logits.shape[1]
        blocks = -(-size // DRAW_BLOCK)
        num_floats = num_threads * blocks * (2 * DRAW_BLOCK + 2)
        if len(self._scratch) < num_floats:
            self._scratch = torch.empty(num_floats)
        drawn = torch.empty_like(rows)
        self._library.draw(
            logits.data_ptr(),
            logits.stride(0),
            size,
            rows.data_ptr(),
            len(rows),
            temperature.data_ptr(),
            uniform.data_ptr(),
            *(None if limit is None else limit.data_ptr() for limit in (min_p, top_k, top_p)),
            drawn.data_ptr(),
            self._scratch.data_ptr(),
            num_threads,
        )
        return drawn


def _column(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As C reads them: side by side."""
    return numbers.to(dtype).contiguous()


def _float32_rows(logits: torch.Tensor) -> torch.Tensor:
    """Of elements side by side; TypeError for another dtype."""
    if logits.dtype is not torch.float32:
        raise TypeError(f"logits are float32, not {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


@functools.cache
def _int64_array(sizes: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(sizes))(*sizes)
