"""The kernels are compiled for GPUs that are not here: a subset of what `tools/compile_kernels.py` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compile_kernels.py"


@pytest.mark.slow
@pytest.mark.parametrize(("target", "case"), [(90, "jamba-large-tp8-int8"), (80, "jamba-mini-tp2-bf16")])
def test_kernels_compile_and_spill_next_to_nothing(target: int, case: str, tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--target", str(target), "--case", case]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    kernels = ("decode", "merge", "prefill", "scan", "scan_alone", "gate_up", "down", "shrink", "expand")
    for kernel in (*kernels, "rms_norm", "silu_and_mul", "rotate", "keep_largest"):
        assert f"\n{kernel} " in result.stdout
