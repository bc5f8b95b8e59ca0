"""State-space operators in C for a CPU: each is one call a layer, for all sequences of a step.

Knows how to hand tensors over; the arithmetic is in `native.c`. Results depend neither on the company
nor on the number of threads nor, with a float32 state, on how a prompt is cut into chunks.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hybridserve.kernels import native
from hybridserve.kernels.native import INT, KINDS, POINTER
from hybridserve.kernels.ssm.interface import SSMBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.registry import Capabilities
    from hybridserve.kernels.ssm.interface import SSMMetadata

SOURCE = Path(__file__).resolve().with_name("native.c")


_BATCH = (POINTER, POINTER, POINTER, INT)
FUNCTIONS = {
    "causal_conv1d": (
        *(*_BATCH, INT, INT),
        *(POINTER, INT, POINTER, INT, POINTER, INT),  # x, weight, bias, silu
        *(POINTER, INT, INT, INT, INT),  # state
        *(POINTER, INT),
    ),
    "selective_scan": (
        *(*_BATCH, INT, INT, INT),
        *(POINTER, INT) * 5,  # u, dt, B, C, z
        *(POINTER, POINTER, POINTER),  # A, D, dt_bias
        *(POINTER, INT, INT, INT, INT),  # state
        *(POINTER, INT),
    ),
    "ssd_scan": (
        *(*_BATCH, INT, INT, INT, INT, INT),
        *(POINTER, INT) * 5,  # x, dt, B, C, z
        *(POINTER, POINTER, POINTER),  # A, D, dt_bias
        *(ctypes.c_double, ctypes.c_double),  # limits of delta
        *(POINTER, INT, INT, INT, INT, INT),  # state
        *(POINTER, INT),
    ),
}
"""What native.c has, by the types of arguments."""


class Native(SSMBackend):
    """RuntimeError where there is no library: ask `why_not` first."""

    name = "native"
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
        library = native.load(SOURCE, FUNCTIONS)
        self._conv, self._scan = library.causal_conv1d, library.selective_scan
        self._ssd_scan = library.ssd_scan

    def causal_conv1d(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
        *,
        silu: bool = True,
    ) -> torch.Tensor:
        dtype = x.dtype if weight.dtype is x.dtype else torch.float32
        rows, weight = _rows(x, dtype), _whole(weight, dtype)
        bias = None if bias is None else _whole(bias, dtype)
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        num_channels, width = weight.shape
        self._conv(
            *_batch(metadata),
            num_channels,
            KINDS[dtype],
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            width,
            None if bias is None else bias.data_ptr(),
            silu,
            *_states(state),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y if dtype is x.dtype else y.to(x.dtype)

    def selective_scan(
        self,
        u: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
    ) -> torch.Tensor:
        dtype, rows = _inputs((u, dt, B, C), z)
        A, D = _whole(A, torch.float32), _whole(D, torch.float32)
        dt_bias = None if dt_bias is None else _whole(dt_bias, torch.float32)
        y = torch.empty_like(u, dtype=dtype, memory_format=torch.contiguous_format)
        self._scan(
            *_batch(metadata),
            *A.shape,
            KINDS[dtype],
            *(argument for x in rows for argument in _place(x)),
            A.data_ptr(),
            D.data_ptr(),
            None if dt_bias is None else dt_bias.data_ptr(),
            *_states(state),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y if dtype is u.dtype else y.to(u.dtype)

    def ssd_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor | None,
        dt_bias: torch.Tensor | None,
        state: torch.Tensor,
        metadata: SSMMetadata,
        *,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> torch.Tensor:
        dtype, rows = _inputs((x, dt, B, C), z)
        A, D = _whole(A, torch.float32), _whole(D, torch.float32)
        dt_bias = None if dt_bias is None else _whole(dt_bias, torch.float32)
        y = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        self._ssd_scan(
            *_batch(metadata),
            *x.shape[1:],
            *B.shape[1:],
            KINDS[dtype],
            *(argument for each in rows for argument in _place(each)),
            A.data_ptr(),
            D.data_ptr(),
            None if dt_bias is None else dt_bias.data_ptr(),
            *dt_limits,
            state.data_ptr(),
            KINDS[state.dtype],
            *state.stride(),
            y.data_ptr(),
            torch.get_num_threads(),
        )
        return y if dtype is x.dtype else y.to(x.dtype)


def _inputs(
    tensors: Sequence[torch.Tensor], z: torch.Tensor | None
) -> tuple[torch.dtype, list[torch.Tensor | None]]:
    """What a scan reads of each token, z last, as rows of one dtype: their own, or else float32."""
    dtype = tensors[0].dtype
    given = [*tensors, z]
    if any(x is not None and x.dtype is not dtype for x in given):
        dtype = torch.float32
    return dtype, [None if x is None else _rows(x if x.dim() == 2 else x.flatten(1), dtype) for x in given]


def _place(rows: torch.Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if rows is None else (rows.data_ptr(), rows.stride(0))


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [T, n] in `dtype` with contiguous rows: x itself if it can be."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.stride(1) == 1 else x.contiguous()


def _whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype` and contiguous, itself if it can be: a call that does nothing still takes microseconds."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def _batch(metadata: SSMMetadata) -> tuple[int, int, int, int]:
    return (
        metadata.query_start.data_ptr(),
        metadata.state_slots.data_ptr(),
        metadata.has_state.data_ptr(),
        len(metadata.state_slots),
    )


def _states(state: torch.Tensor) -> tuple[int, int, int, int, int]:
    slot, channel, last = state.stride()
    return state.data_ptr(), KINDS[state.dtype], slot, channel, last
