#!/usr/bin/env python3
"""Compiles the Triton kernels for GPUs that need not be there, and shows what each asks of the hardware.

    python tools/compile_kernels.py [--target 90 --target 80] [--case NAME ...] [--spill-budget BYTES]

The backends themselves are called, on tensors without memory (torch's meta device), at the shapes of the
models and deployments in `CASES`; every launch is compiled for the target instead. So what is compiled is
what a GPU would be given, tile by tile; and a backend that looked at a value on the device would fail here.

Exits with 1 if a kernel has more bytes of spilled registers than the budget, or does not fit the device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
import triton
from compile_only import SHARED_BYTES, Recorder

from hybridserve.kernels import attention, gemm, lora, moe, pointwise, ssm
from hybridserve.kernels.attention.interface import AttentionMetadata
from hybridserve.kernels.gemm.interface import ScaledWeight, Weight
from hybridserve.kernels.lora.interface import CHUNK_ROWS, LoraBatch, LoraPair, LoraTable, Room, Segment
from hybridserve.kernels.ssm.interface import SSMMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compile_only import Compiled

    from hybridserve.kernels.moe.interface import ExpertGroups

SPILL_BUDGET = 8
"""Bytes a thread: a register that the assembler gives up so that more programs fit."""

SHAPES = Path(__file__).resolve().parent.parent / "hybridserve" / "models" / "shapes"

DECODE = (1, 16, 64, 256)
"""Sequences of a step that decodes."""

PREFILL = (8000, 1, 5)
"""Tokens of the sequences of a step that prefills: a chunk of a prompt, one decode, one that verifies
drafts."""

CONTEXT = 20_000


@dataclass(frozen=True)
class Case:
    """A model as one rank of a deployment has it."""

    model: str  # of hybridserve/models/shapes, `BAMBA`, or `HEADS`: attention alone, of every size
    ranks: int
    weights: str  # format: none, int8, int8-w8a8, fp8
    dtype: torch.dtype = torch.bfloat16


BAMBA = "bamba-9b-d256"
"""Bamba-9B with states as large as transformers has them by default; what was released has half of that."""

HEADS = "attention-heads"

CASES = {
    HEADS: Case(HEADS, 1, "none"),
    "jamba-large-tp8-int8": Case("jamba-large", 8, "int8"),
    "jamba-large-tp8-bf16": Case("jamba-large", 8, "none"),
    "jamba-large-tp8-w8a8": Case("jamba-large", 8, "int8-w8a8"),
    "jamba-mini-int8": Case("jamba-mini", 1, "int8"),
    "jamba-mini-tp2-bf16": Case("jamba-mini", 2, "none"),
    "jamba-mini-fp8": Case("jamba-mini", 1, "fp8"),
    "jamba-3b-bf16": Case("jamba-3b", 1, "none"),
    "jamba-3b-fp32": Case("jamba-3b", 1, "none", torch.float32),
    "bamba-9b-bf16": Case("bamba-9b", 1, "none"),
    "bamba-9b-d256-int8": Case(BAMBA, 1, "int8"),
    "bamba-9b-d256-fp32": Case(BAMBA, 1, "none", torch.float32),
}

TARGETS = {80: [*CASES], 89: ["jamba-3b-bf16"], 90: [*CASES]}
"""By compute capability, unless told: the L40S has the smallest of models in configs/."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""That models have; each with a soft-cap, too."""

BAMBA_SHAPE = json.loads((SHAPES / "bamba-9b.json").read_text()) | {"mamba_d_state": 256}


def empty(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def attend(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    lens: Sequence[int],
    context: int,
    softcap: float | None = None,
) -> None:
    """Attention with and without a window, over blocks that hold nine layers."""
    backend, count, total, block = attention.Triton(), len(lens), sum(lens), 16
    metadata = AttentionMetadata(
        empty(count + 1), empty(count), empty(count, 2000), empty(total), list(lens), [context] * count
    )
    qkv = empty(total, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query, key, value = torch.split_with_sizes(qkv, (heads, kv_heads, kv_heads), 1)
    row = kv_heads * head_dim
    strides = (9 * 2 * block * row, block * row, row, head_dim, 1)
    sizes = (300, 2, block, kv_heads, head_dim)
    cache = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    prepared = backend.prepare(metadata)
    for window in (None, 4096) if total < 64 else (None,):
        backend.forward(query, key, value, cache, prepared, scale=0.1, window=window, softcap=softcap)


def attend_with_heads_of_every_size() -> None:
    steps = (([1], CONTEXT), ([1] * 64, 100), ([*PREFILL], CONTEXT))
    for head_dim, (lens, context), softcap in product(HEAD_DIMS, steps, (None, 50.0)):
        attend(torch.bfloat16, 32, 8, head_dim, lens, context, softcap)


class Model:
    """Calls every operator of a model as its layers would."""

    def __init__(self, case: Case) -> None:
        shape = (
            BAMBA_SHAPE if case.model == BAMBA else json.loads((SHAPES / f"{case.model}.json").read_text())
        )
        self.case = case
        self.hidden = shape["hidden_size"]
        self.heads = shape["num_attention_heads"] // case.ranks
        self.kv_heads = max(1, shape["num_key_value_heads"] // case.ranks)
        self.head_dim = self.hidden // shape["num_attention_heads"]
        self.inner = shape["intermediate_size"] // case.ranks
        self.num_experts = shape.get("num_experts", 1)
        self.vocab_size = shape["vocab_size"]
        self.mamba = None
        self.shape = shape
        if "mamba_dt_rank" in shape:
            self.channels = shape["mamba_expand"] * self.hidden // case.ranks
            self.mamba = (shape["mamba_dt_rank"], shape["mamba_d_state"], shape["mamba_d_conv"])

    def __call__(self) -> None:
        for num_seqs in DECODE:
            self._step([1] * num_seqs, long=num_seqs == 1)
        self._step([*PREFILL], long=True)

    def values(self, *size: int) -> torch.Tensor:
        return empty(*size, dtype=self.case.dtype)

    def weight(self, *size: int) -> Weight:
        kind = self.case.weights
        if kind == "none":
            return self.values(*size)
        codes = empty(*size, dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
        return ScaledWeight(codes, empty(*size[:-1], dtype=torch.float32), kind == "int8-w8a8")

    def _step(self, lens: Sequence[int], *, long: bool) -> None:
        total = sum(lens)
        self._rows(total)
        self._attention(lens, CONTEXT if long else 100)
        self._projections(total)
        if self.mamba is not None:
            self._mamba(lens)
        if "mamba_n_heads" in self.shape:
            self._mamba2(lens)
        if self.num_experts > 1:
            self._experts(total)
        self._adapters(lens)

    def _rows(self, total: int) -> None:
        backend = pointwise.Triton()
        hidden, weight = self.values(total, self.hidden), self.values(self.hidden)
        backend.rms_norm(hidden, weight, 1e-6, (self.hidden,))
        backend.add_rms_norm(hidden, self.values(total, self.hidden), weight, 1e-6)
        backend.silu_and_mul(self.values(total, 2 * self.inner))
        heads = self.values(total, self.heads + 2 * self.kv_heads, self.head_dim)
        angles = self.values(total, 1, self.head_dim // 2)
        backend.rotate(heads[:, : self.heads + self.kv_heads], angles, angles)
        probs = empty(total, self.vocab_size, dtype=torch.float32)
        backend.keep_top_k(probs, empty(total))
        backend.keep_top_p(probs, empty(total, dtype=torch.float32))
        if self.mamba is not None:
            sizes = (self.mamba[0], self.mamba[1], self.mamba[1])
            backend.rms_norm(self.values(total, sum(sizes)), self.values(sum(sizes)), 1e-6, sizes)

    def _attention(self, lens: Sequence[int], context: int) -> None:
        attend(self.case.dtype, self.heads, self.kv_heads, self.head_dim, lens, context)

    def _projections(self, total: int) -> None:
        backend = gemm.Triton()
        if self.case.weights == "none":
            return
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        sizes = [(qkv, self.hidden), (self.hidden, self.heads * self.head_dim)]
        sizes += [(2 * self.inner, self.hidden), (self.hidden, self.inner)]
        if self.mamba is not None:
            sizes += [(2 * self.channels, self.hidden), (self.hidden, self.channels)]
        for num_outputs, num_inputs in sizes:
            backend.linear(self.values(total, num_inputs), self.weight(num_outputs, num_inputs), None)

    def _mamba(self, lens: Sequence[int]) -> None:
        assert self.mamba is not None
        backend, count, total = ssm.Triton(), len(lens), sum(lens)
        dt_rank, num_states, width = self.mamba
        channels = self.channels
        metadata = backend.prepare(
            SSMMetadata(empty(count + 1), empty(count), empty(count, dtype=torch.bool), list(lens))
        )
        x, z = self.values(total, 2 * channels).chunk(2, -1)
        sizes = (channels * (width - 1), channels * num_states)
        conv = self.values(40, 7 * sum(sizes))[:, : sizes[0]].unflatten(1, (channels, width - 1))
        state = empty(40, 7 * sum(sizes), dtype=torch.float32)[:, : sizes[1]]
        weight, bias = self.values(channels, width), self.values(channels)
        u = backend.causal_conv1d(x, weight, bias, conv, metadata)
        selection = self.values(total, dt_rank + 2 * num_states)
        _, B, C = torch.split_with_sizes(selection, (dt_rank, num_states, num_states), -1)
        A, D = empty(channels, num_states, dtype=torch.float32), empty(channels, dtype=torch.float32)
        state = state.unflatten(1, (channels, num_states))
        backend.selective_scan(u, self.values(total, channels), A, B, C, D, z, D, state, metadata)

    def _mamba2(self, lens: Sequence[int]) -> None:
        backend, count, total = ssm.Triton(), len(lens), sum(lens)
        heads, size, states, groups, width = (
            self.shape[f"mamba_{name}"] for name in ("n_heads", "d_head", "d_state", "n_groups", "d_conv")
        )
        inner, shared = heads * size, groups * states
        metadata = backend.prepare(
            SSMMetadata(empty(count + 1), empty(count), empty(count, dtype=torch.bool), list(lens))
        )
        z, xBC, dt = self.values(total, 2 * inner + 2 * shared + heads).split(
            [inner, inner + 2 * shared, heads], 1
        )
        conv = self.values(40, 9, inner + 2 * shared, width - 1)[:, 3]
        xBC = backend.causal_conv1d(xBC, self.values(inner + 2 * shared, width), None, conv, metadata)
        x, B, C = xBC.split([inner, shared, shared], 1)
        B, C = (part.unflatten(1, (groups, states)) for part in (B, C))
        x, z = (part.unflatten(1, (heads, size)) for part in (x, z))
        A, state = empty(heads, dtype=torch.float32), empty(40, 9, heads, size, states, dtype=torch.float32)
        backend.ssd_scan(x, dt, A, B, C, A, z, A, state[:, 3], metadata)

    def _experts(self, total: int) -> None:
        backend, experts = moe.Triton(), self.num_experts
        weights, ids = backend.route(self.values(total, experts), 2, renormalize=False)
        backend.route(self.values(total, experts), 2, renormalize=True)
        gate_up = self.weight(experts, 2 * self.inner, self.hidden)
        down = self.weight(experts, self.hidden, self.inner)
        x = self.values(total, self.hidden)
        backend.experts(x, weights, ids, gate_up, down)
        backend.experts(x, weights, ids, gate_up, down, _Adapters(self, total, experts))

    def _adapters(self, lens: Sequence[int]) -> None:
        backend, total = lora.Triton(), sum(lens)
        batch = _batch_of(lens)
        sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        table, start = LoraTable(4), 0
        pairs = []
        for size in sizes:
            pairs.append(self.pair(self.hidden, size, start))
            start += size
        table.put(1, tuple(pairs))
        backend.add(self.values(total, start), self.values(total, self.hidden), table, batch)
        if max(lens) == 1:
            self._recorded_adapters(backend, tuple(pairs), total)
        table = LoraTable(4)
        table.put(1, (replace(self.pair(self.hidden, 4096), A=self.values(65536, 16)),))
        backend.add_embedding(self.values(total, 4096), empty(total), table, batch)

    def _recorded_adapters(self, backend: lora.Triton, pairs: tuple[LoraPair, ...], total: int) -> None:
        """As a step is recorded: for all the room that adapters of ranks up to 64 have."""
        table = LoraTable(4)
        num_outputs = sum(pair.B.shape[0] for pair in pairs)
        table.room = Room(len(pairs), num_outputs, 64, self.case.dtype)
        backend.write(table, torch.device("meta"))
        batch = replace(_batch_of([1] * total), segments=[], is_recorded=True)
        backend.add(self.values(total, num_outputs), self.values(total, self.hidden), table, batch)

    def pair(self, num_inputs: int, num_outputs: int, start: int = 0) -> LoraPair:
        gain = empty(num_outputs, dtype=torch.float32)
        A, B = self.values(16, num_inputs), self.values(16, num_outputs)
        return LoraPair(A, B, 0.5, start, bias=gain, gain=gain)


class _Adapters:
    """What adapters add inside the experts."""

    def __init__(self, model: Model, total: int, experts: int) -> None:
        self.backend = lora.Triton()
        self.batch = _batch_of([1] * total)
        self.tables = []
        for num_inputs, num_outputs in ((model.hidden, 2 * model.inner), (model.inner, model.hidden)):
            table = LoraTable(4, experts)
            table.put(1, (model.pair(num_inputs, num_outputs),))
            self.tables.append(table)

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.backend.add_experts(y, x, groups.tokens, self.tables[0], self.batch, groups)

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self.backend.add_experts(y, x, None, self.tables[1], self.batch, groups)


def _batch_of(lens: Sequence[int]) -> LoraBatch:
    """All rows of one adapter."""
    total = sum(lens)
    chunks = empty(-(-total // CHUNK_ROWS), 3, dtype=torch.int32)
    return LoraBatch(empty(total), empty(total), [Segment(1, 0, total)], chunks, torch.ones(total).numpy())


def compile_cases(names: Sequence[str], target: int) -> Iterator[Compiled]:
    """Every kernel of some cases once, named after the first that needs it."""
    with Recorder(target) as recorder:
        for name in names:
            known = set(recorder.found)
            recorder.case = name
            if name == HEADS:
                attend_with_heads_of_every_size()
            else:
                Model(CASES[name])()
            yield from (kernel for key, kernel in recorder.found.items() if key not in known)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the Triton kernels without a GPU.")
    parser.add_argument("--target", type=int, action="append", choices=sorted(SHARED_BYTES))
    parser.add_argument("--case", action="append", choices=sorted(CASES))
    parser.add_argument(
        "--spill-budget", type=int, default=SPILL_BUDGET, help="bytes a thread (default: %(default)s)"
    )
    arguments = parser.parse_args()
    print(f"triton {triton.__version__}")
    print(f"{'kernel':20} {'target':7} {'warps':>5} {'regs':>5} {'spill':>6} {'shared':>7}  case, tile")
    num_faults = num_kernels = 0
    for target in arguments.target or TARGETS:
        cases = arguments.case or ([*CASES] if arguments.target else TARGETS[target])
        for kernel in compile_cases(cases, target):
            faults = kernel.faults(arguments.spill_budget)
            num_kernels += 1
            num_faults += bool(faults)
            print(
                f"{kernel.name:20} sm_{kernel.target:<4} {kernel.num_warps:5} {kernel.registers:5} "
                f"{kernel.spilled:6} {kernel.shared:7}  {kernel.case}, {kernel.tile}"
                + "".join(f"  FAULT: {fault}" for fault in faults),
                flush=True,
            )
    print(f"{num_kernels} kernels, {num_faults} with faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
