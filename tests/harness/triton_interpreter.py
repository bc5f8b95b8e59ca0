"""Runs the project's Triton kernels on CPU tensors, in Triton's interpreter.

Triton decides at import whether what it compiles is interpreted, so the variable is set before any test can
import it: `tests/conftest.py` imports this module. With TRITON_INTERPRET=0 in the environment the same tests
run on the GPU.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"

DEVICE = "cpu" if INTERPRETED else "cuda"


def require_triton() -> None:
    """Called at the head of a module of tests: skips it where Triton is not installed."""
    pytest.importorskip("triton", reason="triton is not installed")
    if INTERPRETED:
        _teach_interpreter()


def _teach_interpreter() -> None:
    """What the interpreter (triton 3.6 to 3.9) does and no GPU: it keeps bfloat16 as 16-bit integers,
    multiplies matrices of those, converts whole numbers to those and rounds float32 to them towards zero; a
    condition that holds for a whole tile becomes a number; and its products sum a row in an order that the
    row's place in the tile decides: here in float64, so that it does not show."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if hasattr(InterpreterBuilder, "plain_cast"):
        return
    plain_cast, plain_splat = InterpreterBuilder.cast_impl, InterpreterBuilder.create_splat

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = torch.from_numpy(x.data.copy()).view(torch.bfloat16)
        return TensorHandle(bits.float().numpy(), tl.float32)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        x = widened(x)
        if to.scalar != tl.bfloat16:
            return plain_cast(self, x, to)
        rounded = torch.from_numpy(x.data.astype("float32")).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        products = widened(a).data.astype("float64") @ widened(b).data.astype("float64")
        return TensorHandle((products + total.data).astype(total.data.dtype), total.dtype.scalar)

    def create_splat(self: Any, to: Any, x: Any) -> Any:
        plain = plain_splat(self, to, x)
        return TensorHandle(plain.data.astype(bool), tl.int1) if x.data.dtype == np.bool_ else plain

    InterpreterBuilder.plain_cast = plain_cast
    InterpreterBuilder.create_splat = create_splat
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compared on the CPU, where references compute."""
    import torch

    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that nothing has written holds NaN, or the largest integers. Numbers that are none are no
    warning: a GPU gives none either."""
    import numpy as np
    import torch

    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return x.fill_(float("nan"))
        return x if x.dtype == torch.bool else x.fill_(torch.iinfo(x.dtype).max)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        # triton 3.6 takes scalars out of arrays of one element, as numpy would rather it did not
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="triton")
        yield
