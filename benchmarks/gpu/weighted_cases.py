"""As `cases`, of the operators that read weights: projections, experts, adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.cases import Bound, Case, Inputs, element_bytes, kind_of
from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.kernels.lora.interface import LoraPair, LoraTable
from hybridserve.lora.batch import make_batch

if TYPE_CHECKING:
    from benchmarks.gpu.shapes import Shape
    from hybridserve.kernels.gemm.interface import Weight
    from hybridserve.kernels.lora.interface import LoraBatch

FORMATS = ("none", "int8", "int8-w8a8")
"""Of weights: the dtype of the activations; bytes that meet activations as they are, or rounded ones."""

RANK = 16


def weight_of(inputs: Inputs, weights: str, *size: int) -> Weight:
    """A weight [..., out, in] whose products with normal rows are about as large as those are."""
    if weights == "none":
        x = torch.empty(size, dtype=inputs.dtype, device=inputs.device)
        return x.normal_(std=size[-1] ** -0.5, generator=inputs._generator)
    scales = inputs.normal(*size[:-1], dtype=torch.float32).abs() + 0.5
    return ScaledWeight(inputs.codes(*size), scales / (73 * size[-1] ** 0.5), weights == "int8-w8a8")


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each."""
    return {
        "in_proj": (2 * shape.channels, shape.hidden),
        "out_proj": (shape.hidden, shape.channels),
        "qkv_proj": ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        "gate_up_proj": (2 * shape.inner, shape.hidden),
        "down_proj": (shape.hidden, shape.inner),
    }


def linear(
    shape: str,
    size: tuple[int, int],
    rows: int,
    weights: str,
    dtype: torch.dtype,
    device: str,
    *,
    name: str,
) -> Case:
    inputs = Inputs(dtype, device)
    weight, x, bias = weight_of(inputs, weights, *size), inputs.normal(rows, size[1]), inputs.normal(size[0])

    def bind(backend: Any) -> Bound:
        packed = backend.pack(weight) if weights == "none" else backend.pack_scaled(weight)
        return Bound(lambda: (backend.linear(x, packed, bias),))

    moved = weight_bytes(weights, dtype) * size[0] * size[1] + element_bytes(dtype) * rows * sum(size)
    ops = 2 * rows * size[0] * size[1]
    return Case("gemm", name, shape, moved, ops, arithmetic(weights, dtype), bind)


def weight_bytes(weights: str, dtype: torch.dtype) -> int:
    return element_bytes(dtype) if weights == "none" else 1


def arithmetic(weights: str, dtype: torch.dtype) -> str:
    return "int8" if weights == "int8-w8a8" else kind_of(dtype)


def route(shape: Shape, rows: int, dtype: torch.dtype, device: str, *, name: str, renormalize: bool) -> Case:
    """No two logits of a token are equal, in any dtype."""
    inputs = Inputs(dtype, device)
    logits = inputs.normal(rows, shape.experts).argsort(1).to(dtype) / 4

    def bind(backend: Any) -> Bound:
        return Bound(lambda: backend.route(logits, shape.top_k, renormalize=renormalize))

    moved = logits.nbytes + 12 * rows * shape.top_k
    return Case("moe", name, shape.name, moved, 0, "float32", bind)


def experts(shape: Shape, rows: int, weights: str, dtype: torch.dtype, device: str, *, name: str) -> Case:
    inputs, num_experts, top_k = Inputs(dtype, device), shape.experts, shape.top_k
    gate_up = weight_of(inputs, weights, num_experts, 2 * shape.inner, shape.hidden)
    down = weight_of(inputs, weights, num_experts, shape.hidden, shape.inner)
    x = inputs.normal(rows, shape.hidden)
    probs, ids = inputs.normal(rows, num_experts, dtype=torch.float32).softmax(-1).topk(top_k)

    def bind(backend: Any) -> Bound:
        pack = backend.pack if weights == "none" else backend.pack_scaled
        packed = pack(gate_up, down)
        return Bound(lambda: (backend.experts(x, probs, ids, *packed),))

    size = 3 * shape.inner * shape.hidden
    moved = weight_bytes(weights, dtype) * size * len(ids.unique()) + 2 * x.nbytes
    ops = 2 * rows * top_k * size
    return Case("moe", name, shape.name, moved, ops, arithmetic(weights, dtype), bind)


def adapters(
    shape: Shape, rows: int, num_adapters: int, dtype: torch.dtype, device: str, *, name: str
) -> Case:
    """Added to qkv_proj: three parts, each with an adapter of its own."""
    inputs = Inputs(dtype, device)
    parts = (shape.heads * shape.head_dim, *[shape.kv_heads * shape.head_dim] * 2)
    table = LoraTable(num_adapters)
    for slot in range(1, num_adapters + 1):
        pairs, start = [], 0
        for size in parts:
            A = weight_of(inputs, "none", RANK, shape.hidden)
            pairs.append(LoraPair(A, inputs.normal(RANK, size), 0.25, start))
            start += size
        table.put(slot, tuple(pairs))
    batch = mixed(rows, num_adapters, device)
    x, y = inputs.normal(rows, shape.hidden), inputs.normal(rows, sum(parts))

    def bind(backend: Any) -> Bound:
        own = y.clone()

        def call() -> tuple[()]:
            backend.add(own, x, table, batch)
            return ()

        return Bound(call, lambda: (own,))

    used = min(rows, num_adapters)
    elements = used * RANK * (3 * shape.hidden + sum(parts)) + x.numel() + 4 * y.numel()
    ops = 2 * rows * RANK * (3 * shape.hidden + sum(parts))
    return Case("lora", name, shape.name, element_bytes(dtype) * elements, ops, kind_of(dtype), bind)


def mixed(rows: int, num_adapters: int, device: str) -> LoraBatch:
    """Every row decodes with one of the adapters, in turn."""
    slots = np.arange(rows, dtype=np.int64) % num_adapters + 1
    batch = make_batch(slots, lambda array: torch.from_numpy(array).to(device))
    assert batch is not None
    return batch
