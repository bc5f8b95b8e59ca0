"""What layers offer to adapters, and what they make of them, against plain torch on the merged weights.

On one rank and on several: an adapter is cut as the weight is, and its delta goes in before the collective.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hybridserve.kernels.lora import BACKENDS
from hybridserve.kernels.registry import Capabilities
from hybridserve.layers.embedding import LMHead, VocabParallelEmbedding
from hybridserve.layers.linear import ColumnParallelLinear, OutputSlice, RowParallelLinear, cut
from hybridserve.layers.lora import LoraRegistry
from hybridserve.layers.mlp import GatedMLP
from hybridserve.layers.moe import SparseMoE
from hybridserve.lora.adapter import Adapter, ModuleDelta
from hybridserve.lora.batch import make_batch
from hybridserve.lora.layers import place_adapter
from hybridserve.lora.report import LoadReport
from tests.harness.models import Backends
from tests.harness.tp import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hybridserve.distributed.tp import TPGroup
    from hybridserve.kernels.lora.interface import LoraBackend, LoraBatch
    from hybridserve.layers.context import BuildContext

SLOTS = [2, 0, 1, 2, 1, 0, 2]
"""The adapter of each row."""

Weights = dict[str, torch.Tensor]
Deltas = dict[str, ModuleDelta]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> LoraBackend:
    if reason := request.param.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{request.param.name}: {reason}")
    return request.param()


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta(seed: int, weight: torch.Tensor, *, dora: bool = False, bias: bool = False) -> ModuleDelta:
    """One for a weight [out, in]."""
    outputs, inputs = weight.shape
    rank = 1 + seed % 4
    A, B, scale = random(seed, rank, inputs) / inputs**0.5, random(seed + 1, outputs, rank), 0.25 + seed / 50
    magnitude = None
    if dora:
        magnitude = (weight + scale * B @ A).norm(dim=1) * (1 + 0.2 * random(seed + 2, outputs).clamp(-2, 2))
    return ModuleDelta(A, B, scale, random(seed + 3, outputs) if bias else None, magnitude)


def merge(weight: torch.Tensor, change: ModuleDelta | None) -> torch.Tensor:
    """W' of DoRA, or W + scale B A."""
    if change is None:
        return weight
    merged = weight + change.scale * change.B @ change.A
    if change.magnitude is not None:
        merged *= (change.magnitude / merged.norm(dim=1)).unsqueeze(1)
    return merged


def linear(x: torch.Tensor, name: str, weights: Weights, change: ModuleDelta | None) -> torch.Tensor:
    """x [in] through a module with an adapter."""
    y = merge(weights[f"{name}.weight"], change) @ x
    if f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"]
    if change is not None and change.bias is not None:
        y = y + change.scale * change.bias
    return y


def batch() -> LoraBatch:
    made = make_batch(np.array(SLOTS), torch.from_numpy)
    assert made is not None
    return made


class Adapted:
    """A layer on one rank, with adapters in slots 1 and 2."""

    def __init__(self, tp: TPGroup, backend: LoraBackend) -> None:
        self.tp = tp
        self.registry = LoraRegistry(backend, 2)
        self.context: BuildContext = Backends().context(tp=tp, lora=self.registry)

    def load(self, weights: Weights, adapters: Sequence[Deltas]) -> None:
        for name, tensor in weights.items():
            self.context.weights.tensors[name].load(tensor)
        for finish in self.context.weights.finishers:
            finish()
        for slot, deltas in enumerate(adapters, start=1):
            assert deltas.keys() <= self.registry.modules.keys()
            for name, change in deltas.items():
                module = self.registry.modules[name]
                outputs, inputs = change.B.shape[0], change.A.shape[1]
                assert (module.out_features, module.in_features) == (outputs, inputs)
            adapter = Adapter(str(slot), Path(), deltas, 64, (), LoadReport({}, {}), 0)
            place_adapter(
                adapter, self.registry.modules, torch.float32, torch.device("cpu"), self.tp
            ).install(slot)


def check(got: torch.Tensor, adapters: Sequence[Deltas], want: Callable[[int, Deltas], torch.Tensor]) -> None:
    """`want(row, deltas)`: what a row should be with its adapter."""
    for row, slot in enumerate(SLOTS):
        torch.testing.assert_close(
            got[row], want(row, adapters[slot - 1] if slot else {}), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("targets", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_l025_l029_l031_merged_projections(backend: LoraBackend, size: int, dora: bool, targets: str) -> None:
    """8 query heads and 2 KV heads of 3 rows: on 4 ranks, neighbours share a KV head. Any subset."""
    weights: Weights = {}
    for seed, (name, rows) in enumerate({"q": 24, "k": 6, "v": 6}.items()):
        weights |= {f"m.{name}.weight": random(seed, rows, 5), f"m.{name}.bias": random(seed + 9, rows)}
    adapters = [
        {
            f"m.{n}": delta(7 * s + i, weights[f"m.{n}.weight"], dora=dora, bias=s == 1)
            for i, n in enumerate(t)
        }
        for s, t in enumerate((targets, "q"))
    ]
    x = random(50, len(SLOTS), 5)

    def rank(tp: TPGroup) -> torch.Tensor:
        adapted = Adapted(tp, backend)
        slices = [
            OutputSlice("q", 24, 3),
            OutputSlice("k", 6, 3, replicated=True),
            OutputSlice("v", 6, 3, replicated=True),
        ]
        layer = ColumnParallelLinear(adapted.context, "m", slices, 5, bias=True)
        adapted.load(weights, adapters)
        return layer(x, batch())

    for index, out in enumerate(run_ranks(size, rank)):
        heads = list(range(index * 8 // size, (index + 1) * 8 // size))
        read = sorted({head // 4 for head in heads})

        def want(row: int, deltas: Deltas, heads: list[int] = heads, read: list[int] = read) -> torch.Tensor:
            parts = {n: linear(x[row], f"m.{n}", weights, deltas.get(f"m.{n}")).view(-1, 3) for n in "qkv"}
            return torch.cat([parts["q"][heads], parts["k"][read], parts["v"][read]]).flatten()

        check(out, adapters, want)


@pytest.mark.parametrize("size", [1, 2])
def test_l025_both_halves_of_in_proj_are_cut_alone(backend: LoraBackend, size: int) -> None:
    """One module, two slices; the second half of B is ten times the first."""
    weights = {"m.in_proj.weight": random(1, 16, 6)}
    change = delta(2, weights["m.in_proj.weight"])
    change.B[8:] *= 10
    adapters = [{"m.in_proj": change}, {}]
    x = random(3, len(SLOTS), 6)

    def rank(tp: TPGroup) -> torch.Tensor:
        adapted = Adapted(tp, backend)
        slices = [OutputSlice("in_proj", 8), OutputSlice("in_proj", 8)]
        layer = ColumnParallelLinear(adapted.context, "m", slices, 6)
        adapted.load(weights, adapters)
        return layer(x, batch())

    halves = [out.chunk(2, -1) for out in run_ranks(size, rank)]
    whole = torch.cat([torch.cat([half[i] for half in halves], -1) for i in range(2)], -1)
    check(whole, adapters, lambda row, d: linear(x[row], "m.in_proj", weights, d.get("m.in_proj")))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dora", [False, True])
def test_row_parallel_adds_everything_once(backend: LoraBackend, size: int, dora: bool) -> None:
    """Summands: the base's bias, the adapter's, and what DoRA takes from the base are each there once."""
    weights = {"m.out.weight": random(1, 6, 8), "m.out.bias": random(2, 6)}
    adapters = [
        {"m.out": delta(3, weights["m.out.weight"], dora=dora, bias=True)},
        {"m.out": delta(4, weights["m.out.weight"], dora=dora)},
    ]
    x = random(5, len(SLOTS), 8)

    def rank(tp: TPGroup) -> torch.Tensor:
        adapted = Adapted(tp, backend)
        layer = RowParallelLinear(adapted.context, "m", "out", 8, 6, bias=True)
        adapted.load(weights, adapters)
        return layer(x[:, cut("x", 8, tp)], batch())

    for out in run_ranks(size, rank):
        check(out, adapters, lambda row, d: linear(x[row], "m.out", weights, d.get("m.out")))


VOCAB, HIDDEN = 13, 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_l032_ends_of_a_vocabulary_that_ranks_do_not_divide(
    backend: LoraBackend, size: int, tied: bool
) -> None:
    """On 6 ranks the last holds a single row. Tied or not, each end has its own adapter."""
    weight = random(1, VOCAB, HIDDEN)
    embed, head = delta(2, weight.T, bias=True), delta(5, weight)
    adapters = [{"embed": embed}, {"head": head}]
    ids = torch.tensor([0, 12, 3, 3, 7, 5, 11])

    def rank(tp: TPGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        adapted = Adapted(tp, backend)
        embedding = VocabParallelEmbedding(adapted.context, "embed", VOCAB, HIDDEN, tied=tied)
        embedding.weight.fill_(torch.nan)  # what memory may hold before loading
        output = LMHead(adapted.context, "head", VOCAB, HIDDEN, tied_to=embedding if tied else None)
        adapted.load({"embed.weight": weight, "head.weight": weight}, adapters)
        return embedding(ids, batch()), output(weight[ids], batch())

    def want_hidden(row: int, deltas: Deltas) -> torch.Tensor:
        hidden = merge(weight.T, deltas.get("embed"))[:, ids[row]]
        return hidden + embed.scale * embed.bias if "embed" in deltas else hidden

    results = run_ranks(size, rank)
    for hidden, _ in results:
        check(hidden, adapters, want_hidden)
    (_, logits), *others = results
    assert logits is not None
    assert logits.shape == (len(ids), VOCAB)
    check(logits, adapters, lambda row, d: merge(weight, d.get("head")) @ weight[ids[row]])
    assert all(nothing is None for _, nothing in others)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("targets", ["gate", "up", "down", "gate up", "gate up down"])
def test_l030_parts_of_a_gated_mlp(backend: LoraBackend, size: int, targets: str) -> None:
    shapes = {"gate": (10, 6), "up": (10, 6), "down": (6, 10)}
    weights = {f"m.{n}_proj.weight": random(i, *shape) for i, (n, shape) in enumerate(shapes.items())}
    adapters = [
        {f"m.{n}_proj": delta(5 * s + i, weights[f"m.{n}_proj.weight"]) for i, n in enumerate(t.split())}
        for s, t in enumerate((targets, "down up"))
    ]
    x = random(9, len(SLOTS), 6)

    def rank(tp: TPGroup) -> torch.Tensor:
        adapted = Adapted(tp, backend)
        layer = GatedMLP(adapted.context, "m", 6, 10)
        adapted.load(weights, adapters)
        return layer(x, batch())

    for out in run_ranks(size, rank):
        check(out, adapters, lambda row, d: mlp(x[row], "m", weights, d))


def mlp(x: torch.Tensor, name: str, weights: Weights, deltas: Deltas) -> torch.Tensor:
    gate, up = (
        linear(x, f"{name}.{p}", weights, deltas.get(f"{name}.{p}")) for p in ("gate_proj", "up_proj")
    )
    down = f"{name}.down_proj"
    return linear(F.silu(gate) * up, down, weights, deltas.get(down))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dora", [False, True])
def test_router_and_experts(backend: LoraBackend, size: int, dora: bool) -> None:
    """One adapter on some experts and the router, which sends its rows elsewhere; one on down projections."""
    num_experts, hidden, inner = 4, 6, 10
    weights = {"m.router.weight": random(0, num_experts, hidden)}
    for expert in range(num_experts):
        for i, (part, shape) in enumerate(
            (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))
        ):
            weights[f"m.experts.{expert}.{part}_proj.weight"] = random(10 * expert + i + 1, *shape)
    first = ["m.router", *(f"m.experts.{e}.{p}_proj" for e in (0, 2) for p in ("gate", "up", "down"))]
    second = [f"m.experts.{e}.down_proj" for e in range(num_experts)]
    adapters = [
        {n: delta(s + i, weights[f"{n}.weight"], dora=dora) for i, n in enumerate(names)}
        for s, names in ((3, first), (40, second))
    ]
    x = random(70, len(SLOTS), hidden)

    def rank(tp: TPGroup) -> torch.Tensor:
        adapted = Adapted(tp, backend)
        layer = SparseMoE(
            adapted.context, "m", hidden, inner, num_experts=num_experts, top_k=2, renormalize=False
        )
        adapted.load(weights, adapters)
        return layer(x, batch())

    def want(row: int, deltas: Deltas) -> torch.Tensor:
        shares = linear(x[row], "m.router", weights, deltas.get("m.router")).softmax(0)
        chosen = shares.topk(2).indices.tolist()
        return sum(shares[e] * mlp(x[row], f"m.experts.{e}", weights, deltas) for e in chosen)

    for out in run_ranks(size, rank):
        check(out, adapters, want)


def test_without_a_registry_nothing_is_kept(backend: LoraBackend) -> None:
    """A batch that comes by mistake changes nothing, either."""
    context = Backends().context()
    layer = RowParallelLinear(context, "m", "out", 8, 6)
    context.weights.tensors["m.out.weight"].load(random(1, 6, 8))
    assert not hasattr(layer.projection, "table")
    x = random(2, len(SLOTS), 8)
    assert torch.equal(layer(x, batch()), layer(x, None))


def test_a_module_is_offered_once(backend: LoraBackend) -> None:
    adapted = Adapted(Backends().context().tp, backend)
    GatedMLP(adapted.context, "m", 6, 10)
    module = adapted.registry.modules["m.up_proj"]
    with pytest.raises(ValueError, match=r"two layers offer the module 'm\.up_proj' to adapters"):
        adapted.registry.offer(module)
