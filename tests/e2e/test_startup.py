"""What a start may do before the first token, and the first recorded step: which modules it imports, and that
nothing is built twice.

Modules are looked at, not seconds: importing torch is most of a start, and how long that takes is the
machine's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = os.environ.get("CC", "cc").split()[0]

HEAVY = (
    *("transformers", "triton", "peft", "sympy", "networkx", "scipy", "pandas", "matplotlib", "PIL", "ray"),
    *("llguidance", "jinja2", "uvicorn", "starlette", "fastapi", "aiohttp", "httpx", "prometheus_client"),
    *("torch._dynamo", "torch._inductor", "torch.onnx", "torchvision", "huggingface_hub", "setuptools"),
    *(
        "bitsandbytes",
        "hybridserve.server",
        "hybridserve.bench",
        "hybridserve.chat",
        "hybridserve.engine.convert",
    ),
    *("hybridserve.frontend.async_engine", "hybridserve.models.llama", "hybridserve.models.bamba"),
)
"""None of which a Jamba's greedy text needs."""

SCRIPT = """
import sys
from hybridserve import LLM, SamplingParams
with LLM("demo") as llm:
    outputs = iter(llm.stream("ROMEO:", SamplingParams(temperature=0, max_tokens=8)))
    next(outputs)
    at_first = len(sys.modules)
    list(outputs)
    assert llm.plan.graphs.reason or llm._core.executor.worker.runner.graphs._graphs, "nothing was recorded"
    assert len(sys.modules) < at_first + 20, sorted(sys.modules)[at_first:]
    print(*sorted(sys.modules))
"""


@pytest.fixture(scope="module")
def modules() -> set[str]:
    """Those that are there when a decode step has been recorded."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", HEAVY)
def test_the_first_token_needs_not(modules: set[str], name: str) -> None:
    assert "hybridserve.models.jamba" in modules
    assert name not in modules


def test_the_first_token_imports_little_beside_torch(modules: set[str]) -> None:
    """200 modules of ours, 1,400 in all, 850 of them torch's and numpy's."""
    assert sum(name.startswith("hybridserve") for name in modules) < 250
    packages = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert len(packages) < 60, sorted(packages)


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C compiler ({COMPILER})")
def test_a_warm_start_asks_the_compiler_for_its_version_alone(tmp_path: Path) -> None:
    """The second of two starts with one cache: it prints no line about building, and runs no compiler."""
    calls = tmp_path / "calls"
    script = tmp_path / "cc-counting"
    script.write_text(f'#!/bin/sh\necho "$1" >> {calls}\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "CC": str(script), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "hybridserve",
        "generate",
        "demo",
        "--prompt",
        "ROMEO:",
        "--max_tokens",
        "2",
    ]
    errors = []
    for _ in range(2):
        calls.write_text("")
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        errors.append(done.stderr.partition("\n")[0])
        assert done.stdout.strip()
    assert errors[0] == "building C kernels, once (attention, gemm, gemm bfloat16, lora, moe, pointwise, ssm)"
    assert errors[1].startswith("model ")
    assert calls.read_text().split() == ["--version"]
