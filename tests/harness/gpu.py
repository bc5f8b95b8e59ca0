"""Where the tests of `tests/gpu` run: on a GPU or, in a dry run, all of them on the CPU, small, with Triton's
kernels interpreted, so that no line of them is first run when a GPU is there.

    HYBRIDSERVE_GPU_DRY=1 python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

import os

import torch

from benchmarks.gpu.shapes import TINY, Shape, shapes

DRY = os.environ.get("HYBRIDSERVE_GPU_DRY") == "1"

DEVICE = "cpu" if DRY else "cuda"

SHAPES: list[Shape] = shapes(dry=DRY)

DTYPES = (torch.bfloat16,) if DRY else (torch.bfloat16, torch.float16, torch.float32)
"""Each has the same lines."""

EDGE = 2**9 if DRY else 2**31
"""The first number of elements whose offsets no 32-bit integer holds."""

__all__ = ["DEVICE", "DRY", "DTYPES", "EDGE", "SHAPES", "TINY"]


def free_bytes() -> int:
    """Of the device; on a CPU, where edges are near, as good as endless."""
    return 2**60 if DRY else torch.cuda.mem_get_info()[0]
