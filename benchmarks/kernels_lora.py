"""Adapters: what a decode step of W2's size pays for them, projection by projection.

16 rows, each with one of so many adapters of rank 16; microseconds of the base projection
and of what they add, in shapes of jamba-100m. `benchmarks/kernels.py` runs it and prints the report.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timing import microseconds

from hybridserve.kernels.lora import BACKENDS, Reference
from hybridserve.kernels.lora.interface import LoraPair, LoraTable
from hybridserve.kernels.registry import Capabilities, select
from hybridserve.layers.lora import ExpertAdapters
from hybridserve.lora.batch import make_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridserve.kernels.lora.interface import LoraBackend, LoraBatch
    from hybridserve.kernels.moe.interface import MoEBackend

LAYERS = 8
RANK = 16
NUM_SLOTS = 8
ROWS = (16, 256)
ADAPTERS = (1, 8)

SHAPES = {
    "qkv_proj": (512, (512, 256, 256)),
    "in_proj": (512, (2048,)),
    "x_proj": (1024, (64,)),
    "dt_proj": (32, (1024,)),
    "out_proj": (1024, (512,)),
    "gate_up_proj": (512, (1024, 1024)),
    "down_proj": (1024, (512,)),
    "lm_head": (512, (8192,)),
}
"""Inputs and the outputs of each part that has an adapter of its own."""

EXPERTS = (8, 2, 512, 1024)
"""Experts, experts a token, hidden size, intermediate size."""


def _table(inputs: int, parts: tuple[int, ...], dtype: torch.dtype, num_groups: int = 1) -> LoraTable:
    table = LoraTable(NUM_SLOTS, num_groups)
    starts = list(itertools.accumulate(parts, initial=0))
    for slot, group in itertools.product(range(1, NUM_SLOTS + 1), range(num_groups)):
        pairs = (
            LoraPair(torch.randn(RANK, inputs).to(dtype), torch.randn(RANK, size).to(dtype), 0.1, start)
            for start, size in zip(starts, parts, strict=False)
        )
        table.put(slot, tuple(pairs), group)
    return table


def _batch(num_rows: int, num_adapters: int) -> LoraBatch:
    """Mixed at random; the base model is not among them."""
    slots = np.random.default_rng(0).integers(1, num_adapters + 1, num_rows)
    batch = make_batch(slots, torch.from_numpy)
    assert batch is not None
    return batch


def check(backend: LoraBackend, dtype: torch.dtype) -> None:
    """No speed of what is wrong: raises AssertionError if the backend differs from the reference."""
    table, batch = _table(64, (40, 30), dtype), _batch(16, NUM_SLOTS)
    x, y = torch.randn(16, 64).to(dtype), torch.randn(16, 70)
    want, got = y.clone(), y.clone()
    Reference().add(want, x, table, batch)
    backend.add(got, x, table, batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def measure(dtype: str, seconds: float = 0.1) -> Iterator[dict[str, Any]]:
    """One record a backend, projection, number of rows and of adapters; the reference is left out."""
    torch.manual_seed(0)
    torch_dtype = getattr(torch, dtype)
    capabilities = Capabilities("cpu", dtype)
    gemm, moe = (select(op, "auto", capabilities).backend for op in ("gemm", "moe"))
    backends = [
        backend for backend in BACKENDS if backend is not Reference and not backend.why_not(capabilities)
    ]
    for backend in (candidate() for candidate in backends):
        check(backend, torch_dtype)
        for (name, (inputs, parts)), num_rows in itertools.product(SHAPES.items(), ROWS):
            x = torch.randn(num_rows, inputs).to(torch_dtype)
            weights = [gemm.pack(torch.randn(sum(parts), inputs).to(torch_dtype)) for _ in range(LAYERS)]
            tables = [_table(inputs, parts, torch_dtype) for _ in range(LAYERS)]
            y = gemm.linear(x, weights[0], None)
            base = microseconds(_in_turn(lambda w, x=x: gemm.linear(x, w, None), weights), seconds)
            for num_adapters in ADAPTERS:
                batch = _batch(num_rows, num_adapters)
                added = microseconds(
                    _in_turn(lambda t, x=x, y=y, b=batch, k=backend: k.add(y, x, t, b), tables), seconds
                )
                yield _record(backend, name, num_rows, num_adapters, base, added)
        yield from _experts(backend, moe, torch_dtype, seconds)


def _experts(
    backend: LoraBackend, moe: MoEBackend, dtype: torch.dtype, seconds: float
) -> Iterator[dict[str, Any]]:
    num_experts, top_k, hidden, intermediate = EXPERTS
    layers = [
        (
            moe.pack(
                torch.randn(num_experts, 2 * intermediate, hidden).to(dtype),
                torch.randn(num_experts, hidden, intermediate).to(dtype),
            ),
            _table(hidden, (intermediate, intermediate), dtype, num_experts),
            _table(intermediate, (hidden,), dtype, num_experts),
        )
        for _ in range(LAYERS // 2)
    ]
    for num_rows in ROWS:
        x = torch.randn(num_rows, hidden).to(dtype)
        routing = moe.route(torch.randn(num_rows, num_experts).to(dtype), top_k, renormalize=False)

        def run(layer: Any, batch: LoraBatch | None, x: torch.Tensor = x, routing: Any = routing) -> None:
            weights, gate_up, down = layer
            delta = None if batch is None else ExpertAdapters(backend, gate_up, down, batch)
            moe.experts(x, *routing, *weights, delta)

        base = microseconds(_in_turn(lambda layer, run=run: run(layer, None), layers), seconds)
        for num_adapters in ADAPTERS:
            batch = _batch(num_rows, num_adapters)
            both = microseconds(_in_turn(lambda layer, run=run, b=batch: run(layer, b), layers), seconds)
            yield _record(backend, "experts", num_rows, num_adapters, base, round(both - base, 1))


def _in_turn(call: Callable[[Any], object], layers: list[Any]) -> Callable[[], object]:
    """The next layer at every call: a step doesn't meet the same weights twice."""
    turn = itertools.cycle(layers)
    return lambda: call(next(turn))


def _record(
    backend: LoraBackend, name: str, num_rows: int, num_adapters: int, base: float, added: float
) -> dict[str, Any]:
    return {
        "backend": backend.name,
        "projection": name,
        "rows": num_rows,
        "adapters": num_adapters,
        "base_us": base,
        "adapters_us": added,
    }
