"""Two ranks as one executor: the same answers as one, nothing exposed, every rank its share of the cores."""

from __future__ import annotations

import gc
import socket
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from hybridserve.config.loader import load_config
from hybridserve.core.request import SamplingParams
from hybridserve.distributed.process_group import address_of
from hybridserve.engine.executor import LocalExecutor
from hybridserve.engine.executors import RanksExecutor
from hybridserve.engine.launchers import threads_per_rank
from hybridserve.engine.plan_codec import decode_plan, encode_plan
from hybridserve.engine.planner import make_plan
from hybridserve.lora.adapter import read_adapter
from hybridserve.lora.loader import no_pause
from tests.distributed.engines import add, all_gone, engine, finish, rank_processes, steps, tokens
from tests.harness.adapters import Kit, save_zero_row
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hybridserve.engine.core import EngineCore

PROMPTS = make_prompts([3, 40, 7, 21, 12, 33], vocab_size=128)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, top_k=50, top_p=0.9, n=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=16, ignore_eos=True, min_p=0.01, logit_bias={5: 3.0}),
    SamplingParams(
        temperature=0, max_tokens=24, min_tokens=4, presence_penalty=1.0, repetition_penalty=1.2, logprobs=0
    ),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, frequency_penalty=0.5),
]
OPTIONS = {"max_num_batched_tokens": 24, "max_loaded": 1}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = Kit(tmp_path_factory.mktemp("kit"))
    for name in ("A", "B", "C", "dora"):
        kit.adapter(name)
    return kit


def options(kit: Kit) -> dict[str, object]:
    return {**OPTIONS, "adapters": {name: str(kit.adapter(name)) for name in ("A", "B", "C", "dora")}}


@pytest.fixture(scope="module")
def two(kit: Kit) -> Iterator[EngineCore]:
    """An engine over two ranks that every test here uses, with room for one adapter."""
    with engine(kit.base, tensor=2, **options(kit)) as core:
        assert isinstance(core.executor, RanksExecutor)
        yield core


@pytest.fixture(scope="module")
def one(kit: Kit) -> Iterator[EngineCore]:
    with engine(kit.base, **options(kit)) as core:
        assert isinstance(core.executor, LocalExecutor)
        yield core


def test_every_option_of_a_request(one: EngineCore, two: EngineCore) -> None:
    """In chunks, with a preemption: the same tokens, and scores within rounding."""
    results = []
    for core in (one, two):
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            add(core, f"r{index}", prompt, params)
        outputs = steps(core, 6)
        core.scheduler.preempt(core.scheduler.requests["r0"])
        results.append(finish(core, outputs))
    mine, theirs = results
    assert mine.keys() == theirs.keys()
    for name, outputs in theirs.items():
        for index in {output.index for output in outputs}:
            a, b = ([o for o in found[name] if o.index == index] for found in (mine, theirs))
            assert tokens(a) == tokens(b), name
            for kind in ("logprobs", "prompt_logprobs"):
                scored = [[each for o in found for each in getattr(o, kind) or ()] for found in (a, b)]
                assert len(scored[0]) == len(scored[1])
                for left, right in zip(*scored, strict=True):
                    assert left.token_ids == right.token_ids
                    assert left.logprobs == pytest.approx(right.logprobs, abs=1e-4)
                    assert left.rank == right.rank


def test_f084_one_adapter_slot_for_many(one: EngineCore, two: EngineCore) -> None:
    """A slot that changes hands, with sequences of the base model beside it."""
    results = []
    for core in (one, two):
        for turn, adapter in enumerate(["A", "B", "A", "C", "dora", "A", None]):
            add(core, f"base-{turn}", PROMPTS[0])
            add(core, f"turn-{turn}", PROMPTS[2], adapter=adapter)
            results.append({name: tokens(outputs) for name, outputs in finish(core).items()})
        assert core.gauges()["num_adapter_evictions"] >= 5
    assert results[:7] == results[7:]
    assert len({tuple(result[f"turn-{turn}"]) for turn, result in enumerate(results[:5])}) > 2
    # a delivery that nobody can place any more is kept nowhere
    gc.collect()
    add(two, "last", PROMPTS[0])
    finish(two)
    assert not two.executor._ranks._forgotten


def test_every_rank_checks_an_adapter_before_it_is_needed(kit: Kit, two: EngineCore, tmp_path: Path) -> None:
    """DoRA with a row that no rank alone knows to be zero: out_proj's inputs are cut."""
    executor = two.executor
    modules = executor.adaptable_modules
    path = save_zero_row(kit.base, tmp_path / "zero", "model.layers.0.mamba.out_proj", row=3)
    bad = read_adapter(path, modules, max_rank=64)
    with pytest.raises(ValueError, match=r"lora_magnitude_vector of .*out_proj: .* row 3 .*norm 0"):
        executor.check_adapter(bad, no_pause)
    executor.check_adapter(read_adapter(kit.adapter("dora"), modules, max_rank=64), no_pause)
    add(two, "after", PROMPTS[0], adapter="dora")
    finish(two)


def test_nothing_listens_but_at_the_interface(two: EngineCore) -> None:
    me = psutil.Process()
    (other,) = rank_processes()
    listening = [
        connection.laddr.ip
        for process in (me, other)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the store, and each rank's end of the groups
    assert set(listening) == {"127.0.0.1"}


def test_counters_of_collectives(two: EngineCore) -> None:
    """What a step costs can be told from outside."""
    tp = two.executor._ranks._groups.tp
    before = tp.counters.num_collectives
    add(two, "r", PROMPTS[0], SamplingParams(temperature=0, max_tokens=1))
    finish(two)
    assert tp.counters.num_collectives > before
    assert tp.counters.num_bytes > 0


def test_an_executor_that_is_forgotten_ends_its_ranks(model: Callable[[str], Path]) -> None:
    config = load_config(
        str(model("jamba")), None, {"max_model_len": 64, "memory_bytes": "1MiB", "tensor": 2}
    )
    plan = make_plan(config, model("jamba"))
    before = rank_processes()
    from hybridserve.engine.executors import create_executor

    executor = create_executor(config.parallel, plan, model("jamba"))
    started = [process for process in rank_processes() if process not in before]
    assert len(started) == 1
    del executor
    gc.collect()
    assert all_gone(started)


def test_threads_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(12)))
    assert [threads_per_rank(count) for count in (1, 2, 8, 16)] == [12, 6, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(2) is None


def test_the_callers_threads_are_left_alone(two: EngineCore) -> None:
    before = torch.get_num_threads()
    add(two, "r", PROMPTS[0])
    finish(two)
    assert torch.get_num_threads() == before


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match="'nowhere0' is neither an IPv4 address nor an interface"):
        address_of("nowhere0")
    with pytest.raises(ValueError, match=r"192\.0\.2\.77 is no address of this machine"):
        address_of("192.0.2.77")
    addresses = {"eth7": [type("Address", (), {"family": socket.AF_INET, "address": "10.1.2.3"})()]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    assert address_of("eth7") == address_of("10.1.2.3") == "10.1.2.3"


@pytest.mark.parametrize("more", [{}, {"quantization.format": "int8"}, {"tensor": 2, "pipeline": 2}])
def test_a_plan_comes_out_as_it_went_in(more: dict[str, object], kit: Kit) -> None:
    config = load_config(str(kit.base), None, {"max_model_len": 64, **options(kit), **more})
    plan = make_plan(config, kit.base)
    assert decode_plan(encode_plan(plan)) == plan
    with pytest.raises(ValueError, match="not a plan"):
        decode_plan(b'{"__type__": "ParallelPlan"}')
    with pytest.raises(ValueError, match="not a plan of this version"):
        decode_plan(b'{"__type__": "NoSuchClass"}')
