"""Where rows come from and go to, checked against a plain definition."""

from __future__ import annotations

import pytest
import torch

from hybridserve.distributed.tp import TPGroup
from hybridserve.layers.linear import (
    ColumnParallelLinear,
    OutputSlice,
    OutputSlices,
    ReplicatedLinear,
    RowParallelLinear,
    cut,
)
from tests.harness.models import Backends
from tests.harness.tp import run_ranks


def fill(context, tensors: dict[str, torch.Tensor]) -> None:
    """Load what the layers of a context expect."""
    assert context.weights.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert context.weights.tensors[name].shape == tensor.shape
        context.weights.tensors[name].load(tensor)
    for finish in context.weights.finishers:
        finish()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_cut() -> None:
    assert cut("a", 8, TPGroup(1, 4)) == slice(2, 4)
    assert cut("a", 12, TPGroup(1, 2), unit=3) == slice(6, 12)
    assert [cut("a", 8, TPGroup(r, 4), unit=4, replicated=True) for r in range(4)] == [
        slice(0, 4),
        slice(0, 4),
        slice(4, 8),
        slice(4, 8),
    ]


@pytest.mark.parametrize(
    ("size", "ranks", "unit", "replicated"),
    [(6, 4, 1, False), (8, 4, 4, False), (12, 4, 4, True), (12, 2, 4, True)],
)
def test_uneven_cuts_are_refused(size: int, ranks: int, unit: int, replicated: bool) -> None:
    with pytest.raises(ValueError, match=r"a\.b: .* can't be divided evenly among"):
        cut("a.b", size, TPGroup(0, ranks), unit=unit, replicated=replicated)


def test_slices_of_a_module_follow_each_other() -> None:
    slices = [OutputSlice("xz", 4), OutputSlice("xz", 6), OutputSlice("k", 2)]
    outputs = OutputSlices("m", slices, TPGroup(1, 2))
    assert outputs.module_rows == {"xz": 10, "k": 2}
    assert [p.source for p in outputs.placements] == [slice(2, 4), slice(7, 10), slice(1, 2)]
    assert [p.destination for p in outputs.placements] == [slice(0, 2), slice(2, 5), slice(5, 6)]
    assert outputs.sizes == [2, 3, 1]
    assert outputs.num_rows == 6


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_qkv(size: int) -> None:
    """8 query heads, 2 KV heads of 3 rows; each rank's heads, and the KV heads that they read."""
    tensors = {
        "m.q.weight": random(24, 5),
        "m.q.bias": random(24),
        "m.k.weight": random(6, 5),
        "m.k.bias": random(6),
    }
    x = random(7, 5)
    queries, keys = (
        torch.nn.functional.linear(x, tensors[f"m.{n}.weight"], tensors[f"m.{n}.bias"]).view(7, -1, 3)
        for n in "qk"
    )

    def rank(tp):
        context = Backends().context(tp=tp)
        slices = [OutputSlice("q", 24, 3), OutputSlice("k", 6, 3, replicated=True)]
        layer = ColumnParallelLinear(context, "m", slices, 5, bias=True)
        fill(context, tensors)
        return layer(x, None).view(7, -1, 3)

    for index, out in enumerate(run_ranks(size, rank)):
        mine = range(index * 8 // size, (index + 1) * 8 // size)
        read = sorted({head // 4 for head in mine})
        torch.testing.assert_close(out, torch.cat([queries[:, list(mine)], keys[:, read]], 1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_adds_its_bias_once(size: int) -> None:
    tensors = {"m.out.weight": random(6, 8), "m.out.bias": random(6)}
    x = random(3, 8)
    want = torch.nn.functional.linear(x, tensors["m.out.weight"], tensors["m.out.bias"])

    def rank(tp):
        context = Backends().context(tp=tp)
        layer = RowParallelLinear(context, "m", "out", 8, 6, bias=True)
        fill(context, tensors)
        return layer(x[:, cut("x", 8, tp)], None)

    for out in run_ranks(size, rank):
        torch.testing.assert_close(out, want)


def test_replicated_is_whole_on_every_rank() -> None:
    tensors = {"m.router.weight": random(3, 8)}

    def rank(tp):
        context = Backends().context(tp=tp)
        layer = ReplicatedLinear(context, "m", "router", 8, 3)
        fill(context, tensors)
        return layer(torch.eye(8), None)

    assert all(torch.equal(out, tensors["m.router.weight"].T) for out in run_ranks(2, rank))


def test_two_layers_of_the_same_name_are_refused() -> None:
    context = Backends().context()
    ReplicatedLinear(context, "m", "router", 8, 3)
    with pytest.raises(ValueError, match=r"two layers expect the checkpoint's tensor 'm\.router\.weight'"):
        ReplicatedLinear(context, "m", "router", 8, 3)
