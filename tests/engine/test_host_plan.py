"""How much of the host's memory is taken, what is refused, and what moving bytes is worth in tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hybridserve.config.loader import load_config
from hybridserve.engine import arena_plan
from hybridserve.engine.alternatives import make_plan_or_suggest, plan_or_suggest
from hybridserve.engine.plan_codec import decode_plan, encode_plan
from hybridserve.models.config import load_hf_config
from hybridserve.models.shapes import load_shape
from tests.harness.models import save_model

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.engine.plan import EnginePlan

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jamba")
    save_model("jamba", path, seed=1)
    return path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what this machine has and what of it is free."""

    def has(total: int, available: int) -> None:
        monkeypatch.setattr(arena_plan, "total_memory", lambda: total)
        monkeypatch.setattr(arena_plan, "available_memory", lambda: available)

    has(16 * GIB, 12 * GIB)
    return has


def plan_of(path: Path, **options: Any) -> EnginePlan:
    settings = {"max_model_len": 256, "memory_bytes": "1MiB", "cache.block_size": 4, **options}
    return make_plan_or_suggest(load_config(str(path), None, settings), path)


def row(plan: EnginePlan) -> str:
    return next(line for line in plan.table().splitlines() if line.startswith("host "))


def test_what_is_set_is_taken_in_whole_slabs(path: Path, machine: Any) -> None:
    plan = plan_of(path, host_swap_bytes="3MiB")
    slab = plan.layout.slab_bytes
    assert plan.host.num_slabs == 3 * MIB // slab + 1
    assert plan.host.num_bytes == 3 * MIB // slab * slab
    assert plan.host.preemption == "auto"
    assert "MiB of its memory for swapped sequences and evicted prefixes; preemption auto" in row(plan)
    assert decode_plan(encode_plan(plan)).host == plan.host
    assert plan.to_dict()["host_memory_per_gpu"]["num_slabs"] == plan.host.num_slabs


def test_auto_is_what_fits(path: Path, machine: Any) -> None:
    plan = plan_of(path)
    assert 4 * GIB - plan.layout.slab_bytes < plan.host.num_bytes <= 4 * GIB
    assert "4.0 GiB of its memory (at most) for swapped sequences" in row(plan)
    machine(16 * GIB, 41 * MIB)  # 1 MiB of arena, some of weights
    less = plan_of(path)
    assert 15 * MIB < less.host.num_bytes <= 20 * MIB
    assert "at most: half of the" in row(less)
    two = plan_of(path, **{"parallel.tensor": 2})
    assert 5 * MIB < two.host.num_bytes <= 10 * MIB
    assert "MiB of its memory a rank (at most: half of the" in row(two)
    machine(16 * GIB, 1 * MIB)
    none = plan_of(path)
    assert (none.host.num_slabs, none.host.num_bytes) == (0, 0)
    assert "no memory for swapped sequences and evicted prefixes (weights and arena leave no" in row(none)


def test_less_than_two_slabs_are_none(path: Path, machine: Any) -> None:
    slab = plan_of(path).layout.slab_bytes
    assert plan_of(path, host_swap_bytes=2 * slab).host.num_slabs == 3
    none = plan_of(path, host_swap_bytes=2 * slab - 1)
    assert (none.host.num_slabs, none.host.num_bytes) == (0, 0)
    assert "are less than 2 slabs of" in row(none)
    off = plan_of(path, host_swap_bytes=0)
    assert off.host.num_slabs == 0
    assert "(cache.host_swap_bytes is 0)" in row(off)


def test_nothing_is_taken_that_nobody_would_use(path: Path, machine: Any) -> None:
    options = {"preemption": "recompute", "host_swap_bytes": "3MiB"}
    assert plan_of(path, **options).host.num_slabs > 0  # evicted prefixes go there
    none = plan_of(path, **options, prefix_caching=False)
    assert none.host.num_slabs == 0
    assert "scheduler.preemption is recompute, and prefixes are not kept" in row(none)


@pytest.mark.parametrize("size", ["0", "1KiB"])
def test_swaps_to_nowhere_are_refused(path: Path, machine: Any, size: str) -> None:
    with pytest.raises(ValueError, match=r"scheduler.preemption: swap needs host memory.*host_swap_bytes to"):
        plan_of(path, preemption="swap", host_swap_bytes=size)
    assert plan_of(path, preemption="swap", host_swap_bytes="1MiB").host.preemption == "swap"


def test_a_size_that_does_not_fit_is_refused_with_one_that_does(path: Path, machine: Any) -> None:
    """Beside the weights and arenas of all ranks of this machine."""
    message = (
        r"cache.host_swap_bytes: 6.0 GiB x 2 ranks, beside .* of weights and 2.0 GiB x 2 ranks of arena, "
    )
    message += r"is more than the 12.0 GiB .*; what would fit: cache.host_swap_bytes: (\d.\d)GiB"
    machine(12 * GIB, 12 * GIB)
    options = {"memory_bytes": "2GiB", "parallel.tensor": 2}
    with pytest.raises(ValueError, match=message) as refused:
        plan_of(path, host_swap_bytes="6GiB", **options)
    advised = str(refused.value).rpartition(" ")[2]
    assert 3.8 <= float(advised.removesuffix("GiB")) < 4
    assert plan_of(path, host_swap_bytes=advised, **options).host.num_slabs
    assert plan_of(path, host_swap_bytes="6GiB", memory_bytes="2GiB").host.num_slabs  # of one rank
    elsewhere = {**options, "parallel.executor": "torchrun"}  # how many of its ranks are here is not known
    assert plan_of(path, host_swap_bytes="6GiB", **elsewhere).host.num_slabs


def test_a_share_is_taken_of_what_host_memory_leaves(path: Path, machine: Any) -> None:
    options = {"memory_bytes": None, "max_num_seqs": 100_000, "max_model_len": 16}
    machine(GIB, GIB)
    plan = plan_of(path, host_swap_bytes="300MiB", **options)
    assert 0.85 * (724 * MIB) < plan.arena_bytes < 0.9 * (724 * MIB)
    with pytest.raises(
        ValueError, match=r"cache.host_swap_bytes: 2.0 GiB are not less than the .* what would"
    ) as no:
        plan_of(path, host_swap_bytes="2GiB", **options)
    assert plan_of(path, host_swap_bytes=str(no.value).rpartition(" ")[2], **options).host.num_slabs


def test_stages_have_slabs_of_their_own_size(path: Path, machine: Any) -> None:
    """Ids are common; what the largest stage can hold, all can."""
    plan = plan_of(path, **{"parallel.pipeline": 2, "host_swap_bytes": "3MiB"})
    sizes = [stage.layout.slab_bytes for stage in plan.stages]
    assert plan.host.num_slabs == 3 * MIB // max(sizes) + 1
    assert plan.host.num_bytes == (plan.host.num_slabs - 1) * max(sizes)


def elsewhere(**options: Any) -> EnginePlan:
    config = load_config("jamba-large", None, {"hardware": "h100-80gb", "format": "int8", **options})
    return plan_or_suggest(config, load_shape("jamba-large"))


def test_bytes_of_a_token_are_as_slow_as_the_token() -> None:
    """Jamba-Large on eight H100: 2 x 93.6e9 operations a token at 60 % of 8 x 989e12 a second are 39.4 us, in
    which 0.99 MB cross 50 GB/s twice. Two stages compute one after the other, and copy likewise."""
    eight = elsewhere(tensor=8).host.swap_bytes_per_token
    assert eight == pytest.approx(2 * 93.6e9 / (8 * 0.6 * 989e12) * 50e9 / 2, rel=1e-2)
    assert elsewhere(tensor=8, pipeline=2).host.swap_bytes_per_token == pytest.approx(eight / 2, rel=1e-2)
    assert elsewhere(tensor=16).host.swap_bytes_per_token == pytest.approx(eight / 2, rel=1e-2)


def test_of_a_host_that_is_elsewhere_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> int:
        raise AssertionError("this machine was asked")

    for name in ("total_memory", "available_memory"):
        monkeypatch.setattr(arena_plan, name, never)
    assert 3.9 * GIB < elsewhere(tensor=8).host.num_bytes <= 4 * GIB
    assert "4.0 GiB of its memory a rank (at most) for swapped" in row(elsewhere(tensor=8))
    assert 99 * GIB < elsewhere(tensor=8, host_swap_bytes="100GiB").host.num_bytes <= 100 * GIB


def test_suggestions_name_the_key(path: Path, machine: Any) -> None:
    machine(GIB, GIB)
    config = load_config(
        str(path), None, {"memory_bytes": "1MiB", "max_model_len": 256, "host_swap_bytes": "2GiB"}
    )
    with pytest.raises(ValueError, match=r"what would fit: cache.host_swap_bytes: 10") as refused:
        plan_or_suggest(config, load_hf_config(path))
    assert "cache.memory_bytes" not in str(refused.value)
