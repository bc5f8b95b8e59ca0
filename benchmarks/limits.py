"""What a machine can do at most, measured: bytes read a second, and multiply-adds a second of large products.

A run that reads every weight once a step and multiplies as fast as the fastest product here takes
`floor_seconds`. States, KV blocks, scans and attention are left out, so no engine gets there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from timing import microseconds

from hybridserve.engine.roofline import share_read
from hybridserve.kernels.gemm.interface import GemmBackend, ScaledWeight
from hybridserve.kernels.registry import Capabilities, candidates

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hybridserve.engine.plan import EnginePlan

ROWS, OUTPUTS, INPUTS = 512, 1024, 1024
"""Of the product whose speed is the limit: large enough to be bound by arithmetic."""

MACS = ROWS * OUTPUTS * INPUTS


class Step(NamedTuple):
    """What one step of an engine computed."""

    num_tokens: int
    num_draws: int
    seconds: float


def read_bandwidth(num_bytes: int, seconds: float) -> dict[str, float]:
    """Bytes a second of reading memory as large as the weights, front to back, by operators that do little
    else. The largest is the limit."""
    memory = torch.ones(max(num_bytes // 4096, 1), 1024)
    vector = torch.ones(1024)
    out = torch.empty(len(memory))
    calls = {
        "sum": memory.sum,
        "amax": memory.amax,
        "matrix times vector": lambda: torch.mv(memory, vector, out=out),
    }
    return {name: memory.nbytes / microseconds(call, seconds) * 1e6 for name, call in calls.items()}


def product_rates(weights: str, seconds: float) -> dict[str, float]:
    """Multiply-adds a second of every backend that multiplies such weights here ("float32", "bf16" or
    "int8"). bfloat16 may be widened, and so may int8: a limit is the largest of its own and of those."""
    kinds = {"float32": ("float32",), "bf16": ("bf16", "float32"), "int8": ("int8", "bf16", "float32")}
    rates = {}
    for kind in kinds[weights]:
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        x = torch.randn(ROWS, INPUTS, dtype=dtype)
        scaled = "int8" if kind == "int8" else "none"
        for backend_type in candidates("gemm"):
            capabilities = Capabilities("cpu", str(dtype).removeprefix("torch."), scaled)
            if backend_type.name == "reference" or backend_type.why_not(capabilities) is not None:
                continue
            backend = backend_type()
            assert isinstance(backend, GemmBackend)
            if kind == "int8":
                codes = torch.randint(-127, 128, (OUTPUTS, INPUTS), dtype=torch.int8)
                packed = backend.pack_scaled(ScaledWeight(codes, torch.ones(OUTPUTS)))
            else:
                packed = backend.pack(torch.randn(OUTPUTS, INPUTS, dtype=dtype))
            taken = microseconds(lambda b=backend, w=packed, x=x: b.linear(x, w, None), seconds)
            rates[f"{kind}, {backend.name}"] = MACS / taken * 1e6
    return rates


def floor_seconds(
    plan: EnginePlan, head_parameters: int, steps: Iterable[Step], bandwidth: float, macs: float
) -> float:
    """What `steps` take at those limits: each the longer of reading its weights and of multiplying. Rows
    that draw nothing skip the output head."""
    cost = plan.stages[0].cost
    total = 0.0
    for step in steps:
        read = sum(size * share_read(kind.active, step.num_tokens) for kind, size in cost.weights.items())
        body = (cost.active_parameters - head_parameters) * step.num_tokens
        total += max(read / bandwidth, (body + head_parameters * step.num_draws) / macs)
    return total


def head_parameters(path: Path) -> int:
    """Parameters of a model's output head."""
    from hybridserve.models.config import load_hf_config

    config = load_hf_config(path)
    return int(config["vocab_size"]) * int(config["hidden_size"])
