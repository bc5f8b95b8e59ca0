"""What is tested here needs a GPU, compiled kernels, and the memory that the last test has given back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.harness.gpu import DRY
from tests.harness.triton_interpreter import INTERPRETED, require_triton

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    if DRY:
        require_triton()
        yield
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if INTERPRETED:
        pytest.fail("kernels would be interpreted: set TRITON_INTERPRET=0, as benchmarks/gpu.sh does")
    yield
    torch.cuda.empty_cache()
