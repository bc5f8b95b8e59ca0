"""Adapters through a guarded engine: whoever is there, whatever is loaded, each request is served with what
it asked for. Recipes of the design are named by their numbers."""

from __future__ import annotations

import random
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.core.request import SamplingParams
from hybridserve.engine.adapters import last_occurrence
from hybridserve.engine.messages import AdapterState
from hybridserve.lora import store as store_module
from hybridserve.lora.paths import CONFIG_FILE, WEIGHTS_FILE
from hybridserve.lora.tensor_file import TensorFile
from tests.harness.adapter_engine import AdapterEngine, Oracles
from tests.harness.adapters import activated_logits, save_zero_row
from tests.harness.engine import Guarded, make_prompts
from tests.harness.pairwise import pairwise

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.harness.adapters import Kit

NAMES = ("A", "B", "C", "D", "E", "F")
Q_PROJ = "base_model.model.model.layers.2.self_attn.q_proj"


@pytest.fixture(scope="session")
def oracles(kit: Kit) -> Oracles:
    return Oracles(kit)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    return make_prompts(lengths, seed, vocab_size=128)


@pytest.fixture(scope="session")
def watched() -> list[list[str]]:
    """Lists that each path is added to when it is opened. There is no way to take a hook away again."""
    lists: list[list[str]] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and lists:
            for one in lists:
                one.append(str(args[0]))

    sys.addaudithook(hook)
    return lists


@pytest.fixture
def opened(watched: list[list[str]]) -> Iterator[list[str]]:
    """The path of every file that is opened."""
    watched.append([])
    yield watched[-1]
    watched.pop()


def replace(directory: Path, by: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(by, directory)


# ---- mixed batches


@pytest.mark.parametrize("chunk", [1, 5, 256])
def test_a_mixed_batch_is_each_adapter_alone(kit: Kit, oracles: Oracles, chunk: int) -> None:
    engine = AdapterEngine(kit, NAMES, chunk=chunk)
    for name in NAMES:
        engine.ask(f"warm {name}", [5], name, 1)
    engine.run()
    for index, prompt in enumerate(prompts([3, 12, 7, 20, 5, 9, 16, 4, 11])):
        engine.ask(f"r{index}", prompt, [None, *NAMES, "A", "B"][index])
    engine.run()
    engine.check_all(oracles)
    if chunk == 256:
        assert max(len(set(step.adapter_slots.tolist())) for step in engine.executor.inputs) == 7


def test_the_adapters_of_the_kit_differ(kit: Kit, oracles: Oracles) -> None:
    """Else a wrong one would pass for the right one."""
    prompt = prompts([20])[0]
    logits = {name: oracles[name].forward(prompt)[0] for name in (None, *NAMES)}
    for one in logits:
        for other in logits:
            if one != other:
                assert (logits[one] - logits[other]).abs().mean() > 0.03, (one, other)


AXES: dict[str, list[Any]] = {
    "chunk": [1, 3, 5, 16, 64],
    "mix": [("A", None), ("B", "A", None, "C"), NAMES, ("A", "A", "B")],
    "max_loaded": [1, 2, 6],
    "row_order": ["forward", "reverse", "shuffled"],
    "preempt_every": [None, 3],
    "delay": [0, 1],
    "buckets": [(), (4, 8, 16)],
}
CELLS = pairwise(AXES)


def run_cell(kit: Kit, oracles: Oracles, cell: dict[str, Any], lengths: Sequence[int]) -> None:
    cell = dict(cell)
    mix, max_loaded = cell.pop("mix"), cell.pop("max_loaded")
    engine = AdapterEngine(kit, NAMES, lora={"max_loaded": max_loaded}, **cell)
    for index, prompt in enumerate(prompts(lengths)):
        engine.ask(f"r{index}", prompt, mix[index % len(mix)])
        if index % 3 == 2:
            engine.step()
    engine.run()
    engine.check_all(oracles)


@pytest.mark.parametrize("cell", CELLS[::3], ids=str)
def test_matrix_sample_with_adapters(kit: Kit, oracles: Oracles, cell: dict[str, Any]) -> None:
    run_cell(kit, oracles, cell, [4, 17, 1, 9, 23, 6])


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_matrix_with_adapters(kit: Kit, oracles: Oracles, cell: dict[str, Any]) -> None:
    run_cell(kit, oracles, cell, [1, 2, 3, 5, 7, 9, 12, 16, 17, 23, 30])


def test_f086_lora_on_without_adapters_is_lora_off(kit: Kit) -> None:
    results = []
    for engine in (AdapterEngine(kit), Guarded(kit.base)):
        for index, prompt in enumerate(prompts([4, 11])):
            engine.add(f"r{index}", prompt)
        results.append(engine.run())
    for key, result in results[0].items():
        assert torch.equal(torch.stack(result.logits), torch.stack(results[1][key].logits))


def test_l003_the_base_after_an_adapter_is_the_base(kit: Kit) -> None:
    """Bit for bit: with the same company, in an engine that never saw an adapter."""
    prompt = prompts([9])[0]
    engine = AdapterEngine(kit, ["A", "E"])
    for name in ("A", "E"):
        engine.ask(name, prompt, name)
        engine.run()
    engine.ask("base", prompt, None)
    engine.run()
    plain = Guarded(kit.base)
    plain.add("base", prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    expected = plain.run()["base", 0]
    assert torch.equal(torch.stack(engine.results["base", 0].logits), torch.stack(expected.logits))


def test_base_rows_of_a_mixed_step_are_the_bits_of_an_engine_without_lora(kit: Kit) -> None:
    """The same rows in the same steps; only that some of the others have an adapter."""
    rows = []
    for engine in (AdapterEngine(kit, ["A", "C"]), Guarded(kit.base)):
        adapters = ["A", None, "C", None] if isinstance(engine, AdapterEngine) else [None] * 4
        for name in filter(None, adapters):
            engine.add(f"warm {name}", [5], adapter=name)
        while engine.core.has_work:
            engine.step()
        before = len(engine.executor.inputs)
        params = SamplingParams(max_tokens=1, temperature=0)
        for index, (prompt, name) in enumerate(zip(prompts([7, 7, 9, 5]), adapters, strict=True)):
            engine.add(f"r{index}", prompt, params, adapter=name)
        engine.run()
        assert [len(step.input_ids) for step in engine.executor.inputs[before:]] == [28]
        rows.append([engine.results[f"r{index}", 0].logits[0] for index in (1, 3)])
    assert all(torch.equal(one, other) for one, other in zip(*rows, strict=True))


def test_l011_long_prompts_in_chunks_beside_decodes(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, ["A", "B"], chunk=5)
    engine.ask("decode", prompts([4])[0], "B", 24)
    for _ in range(4):
        engine.step()
    engine.ask("long", prompts([41], seed=3)[0], "A", 8)
    request = engine.core.scheduler.requests["long"]
    while request.num_computed < 10:
        engine.step()
    assert 0 < request.num_computed < request.num_prompt
    engine.core.scheduler.preempt(request)
    while len(request.output_ids) < 3:
        engine.step()
    engine.core.scheduler.preempt(request)
    engine.run()
    engine.check_all(oracles)
    assert engine.results["long", 0].metrics.num_preemptions == 2


def test_forks_use_their_parents_adapter(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, ["A", "B"], lora={"max_loaded": 1})
    for name in ("A", "B"):
        engine.ask(name, prompts([6])[0], name, n=3)
    engine.step()
    engine.run()
    engine.check_all(oracles)
    assert engine.info("A").num_refs == 0


# ---- loads while others run


@pytest.mark.parametrize("delay", [0, 1])
def test_b038_s030_l001_loads_beside_running_requests_change_nothing_for_them(
    kit: Kit, oracles: Oracles, delay: int
) -> None:
    """Every third step another adapter comes into the slots that are left, and under names that are used."""
    engine = AdapterEngine(kit, NAMES, lora={"max_loaded": 3}, delay=delay, chunk=16)
    engine.ask("a", prompts([5])[0], "A", 60)
    engine.ask("b", prompts([8], seed=1)[0], "B", 60)
    others = ["C", "D", "E", "F"]
    for count in range(54):
        if count % 3 == 0:
            name = others[count // 3 % 4]
            engine.ask(f"o{count}", prompts([3 + count % 5], seed=count)[0], name, 2)
        if count % 9 == 4:
            engine.load("A" if count % 2 else "X", kit.adapter(others[count % 4]))
            engine.load("A", kit.adapter("A"))
        engine.step()
    engine.run()
    engine.check_all(oracles)
    assert engine.core.gauges()["num_adapter_evictions"] > 5
    generations = [step.adapter_generations[:, 1].max(initial=0) for step in engine.executor.inputs]
    assert max(generations) > 3


def test_f081_a_load_at_every_step(kit: Kit, oracles: Oracles) -> None:
    for when in range(8):
        engine = AdapterEngine(kit, ["A", "B", "C", "D"], lora={"max_loaded": 3})
        engine.ask("d", prompts([3])[0], "D", 1)
        engine.run()
        for name in ("A", "B", None):
            engine.ask(str(name), prompts([6])[0], name, 8)
        for _ in range(when):
            engine.step()
        engine.ask("c", prompts([4])[0], "C", 4)
        engine.run()
        engine.check_all(oracles)


def test_a_worker_refuses_a_step_for_another_generation(kit: Kit) -> None:
    """The guard against L001: should the books ever be wrong, nobody is served with another adapter."""
    engine = AdapterEngine(kit, ["A", "B"])
    engine.ask("a", prompts([4])[0], "A")
    while not engine.core.scheduler.num_running:
        engine.step()
    worker = engine.executor.worker
    assert worker is not None
    (slot, (generation, placed)), *_ = worker._adapters.items()
    worker._adapters[slot] = (generation + 1, placed)
    with pytest.raises(RuntimeError, match="generation"):
        engine.step()
    worker._adapters[slot] = (generation, placed)
    engine.run()


def test_l063_a_slow_load_holds_nobody_up_and_happens_once(
    kit: Kit, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes two seconds to be read, by the reader that there is."""
    engine = AdapterEngine(kit, ["A", "B"], lora={"host_bytes": 1}, chunk=64)
    plain, reads, steps = TensorFile.read, [], []

    def slow(self: TensorFile, name: str) -> torch.Tensor:
        reads.append((self.path, name))
        before = engine.steps
        time.sleep(1)
        steps.append(engine.steps - before)
        return plain(self, name)

    monkeypatch.setattr(TensorFile, "read", slow)
    engine.ask("base 0", prompts([5])[0], None, 200)
    engine.step()
    begin = time.monotonic()
    engine.ask("b1", prompts([5])[0], "B", 4)
    engine.ask("b2", prompts([7])[0], "B", 4)
    gaps, last, loaded = [], begin, 0.0
    while engine.core.has_work:
        outputs = engine.step()
        loaded = loaded or (time.monotonic() if engine.core.adapters.num_loads else 0.0)
        if any(output.request_id.startswith("base") for output in outputs):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
        if not loaded and not engine.core.scheduler.num_running:
            engine.ask(f"base {len(gaps)}", prompts([5])[0], None, 200)
    engine.check_drained()
    engine.check_all(oracles)
    assert sorted(reads) == [
        (kit.adapter("B") / WEIGHTS_FILE, f"{Q_PROJ}.lora_{part}.weight") for part in "AB"
    ]
    assert loaded - begin > 2
    assert min(steps) > 5, "a running request waited for the reader"
    assert max(gaps) < 0.9  # less than a read takes, however busy the machine is


def test_waiting_for_the_loader_does_not_spin(
    kit: Kit, oracles: Oracles, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = AdapterEngine(kit, ["A"], lora={"host_bytes": 1})
    plain = store_module.read_adapter
    monkeypatch.setattr(store_module, "read_adapter", lambda *a, **k: (time.sleep(0.5), plain(*a, **k))[1])
    engine.ask("a", prompts([5])[0], "A", 3)
    steps = 0
    while engine.core.has_work:
        engine.step()
        steps += 1
    engine.check_all(oracles)
    assert steps < 30


def test_b040_what_could_not_be_placed_is_refused_when_it_is_loaded(
    kit: Kit, oracles: Oracles, tmp_path: Path
) -> None:
    """And at the start; not by aborting whoever asks for it first."""
    zero = save_zero_row(kit.base, tmp_path / "zero", "model.layers.0.mamba.out_proj")
    engine = AdapterEngine(kit, ["dora"], roots=[tmp_path])
    engine.ask("running", prompts([5])[0], "dora", 20)
    engine.step()
    with pytest.raises(ValueError, match=r"^adapter 'z': .*lora_magnitude_vector of .*out_proj: .*norm 0"):
        engine.load("z", zero)
    with pytest.raises(ValueError, match=r"^adapter: 'z' is unknown"):
        engine.ask("z", [5], "z")
    engine.load("z", kit.adapter("B"))
    engine.ask("z", prompts([5])[0], "z")
    engine.run()
    engine.check_all(oracles, z="B")
    with pytest.raises(ValueError, match=r"^lora\.adapters\.z: .*lora_magnitude_vector"):
        AdapterEngine(kit, lora={"adapters": {"z": str(zero)}})


# ---- names and versions


def test_l005_a_name_given_to_another_adapter(kit: Kit, oracles: Oracles) -> None:
    for runs_between in (True, False):
        engine = AdapterEngine(kit)
        prompt = prompts([8])[0]
        engine.load("n", kit.adapter("A"))
        if runs_between:
            engine.ask("first", prompt, "n")
            engine.run()
        assert engine.unload("n")
        engine.load("n", kit.adapter("B"))
        engine.ask("second", prompt, "n")
        engine.run()
        engine.check_all(oracles, first="A", second="B")


@pytest.mark.parametrize("delay", [0, 1])
def test_l052_running_requests_finish_on_the_version_they_began_with(
    kit: Kit, oracles: Oracles, tmp_path: Path, delay: int
) -> None:
    """The files of the old version are gone; a request that waits for it, and one that is preempted, too."""
    engine = AdapterEngine(kit, ["C"], lora={"max_loaded": 1}, roots=[tmp_path], max_num_seqs=1, delay=delay)
    kit.copy("A", tmp_path / "n")
    engine.load("n", "n")
    engine.ask("old", prompts([5])[0], "n", 12)
    while not engine.results["old", 0].token_ids:
        engine.step()
    engine.ask("old but waiting", prompts([6])[0], "n", 4)
    replace(tmp_path / "n", kit.adapter("B"))
    engine.load("n", "n")
    engine.ask("new", prompts([5])[0], "n", 12)
    engine.ask("other", prompts([5])[0], "C", 3)
    assert [info.state for info in engine.core.adapters.infos()].count(AdapterState.DRAINING) == 1
    engine.step()
    engine.core.scheduler.preempt(engine.core.scheduler.requests["old"])
    engine.run()
    engine.check_all(oracles, **{"old": "A", "old but waiting": "A", "new": "B"})
    assert [info.name for info in engine.core.adapters.infos()] == ["C", "n"]


def test_reloading_equal_content_changes_nothing(kit: Kit, tmp_path: Path) -> None:
    engine = AdapterEngine(kit, ["A"], roots=[tmp_path])
    engine.ask("a", prompts([5])[0], "A", 2)
    engine.run()
    before = engine.info("A")
    held = engine.held_bytes
    engine.load("A", kit.copy("A", tmp_path / "copy"))
    engine.load("also", tmp_path / "copy")
    assert (engine.info("A").identity, engine.info("A").state) == (before.identity, AdapterState.DEVICE)
    engine.ask("again", prompts([5])[0], "also", 2)
    engine.run()
    assert engine.held_bytes == held
    assert engine.core.gauges()["num_adapter_loads"] == 1


def test_l053_nothing_is_opened_while_serving(kit: Kit, opened: list[str]) -> None:
    """Not by anybody in this process, on whichever thread."""
    engine = AdapterEngine(kit, ["A"])
    engine.ask("warm", prompts([5])[0], "A", 2)
    engine.run()
    opened.clear()
    engine.load("A", kit.adapter("B"))
    files = [str(kit.adapter("B") / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    assert [path for path in opened if path in files] == files
    engine.ask("a", prompts([5])[0], "A", 20)
    while not engine.results["a", 0].token_ids:
        engine.step()
    before = engine.steps
    opened.clear()
    engine.run()
    assert engine.steps - before >= 19
    assert opened == []


def test_an_adapter_whose_files_are_gone_ends_those_who_wait_for_it(
    kit: Kit, oracles: Oracles, tmp_path: Path
) -> None:
    engine = AdapterEngine(kit, ["B"], lora={"host_bytes": 1}, roots=[tmp_path])
    kit.copy("A", tmp_path / "n")
    engine.load("n", "n")
    replace(tmp_path / "n", kit.adapter("C"))
    engine.ask("base", prompts([4])[0], None, 8)
    engine.step()
    engine.ask("lost", prompts([4])[0], "n", n=2)
    engine.ask("b", prompts([4])[0], "B")
    outputs = []
    while engine.core.has_work:
        outputs += engine.step()
    engine.check_drained()
    (end,) = [output for output in outputs if output.request_id == "lost"]
    assert end.finish_reason == "abort"
    assert "adapter 'n' could not be loaded" in str(end.stop_reason)
    assert "have changed" in str(end.stop_reason)
    oracles["B"].check(engine.results["b", 0])
    oracles[None].check(engine.results["base", 0])
    engine.load("n", "n")
    engine.ask("found", prompts([4])[0], "n")
    engine.run()
    oracles["C"].check(engine.results["found", 0])


# ---- bytes, slots and references come back


def test_l048_unloading_gives_everything_back(kit: Kit) -> None:
    engine = AdapterEngine(kit)
    assert engine.held_bytes == (0, 0, 0)
    engine.load("n", kit.adapter("A"))
    engine.load("m", kit.adapter("A"))
    for name in ("n", "m"):
        engine.ask(name, prompts([5])[0], name)
    engine.run()
    on_device, there, on_host = engine.held_bytes
    assert on_device == there == engine.info("n").device_bytes
    assert on_host == engine.info("n").num_bytes
    assert engine.unload("n")
    assert engine.held_bytes == (on_device, there, on_host)
    assert engine.unload("m")
    assert engine.held_bytes == (0, 0, 0)


def test_l049_fifty_cycles_in_two_slots(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, lora={"max_loaded": 2}, checksum=False)
    prompt = prompts([4])[0]
    for count in range(50):
        name = NAMES[count % 4]
        engine.load("n", kit.adapter(name))
        engine.ask(f"r{count}", prompt, "n", 2)
        engine.run()
        oracles[name].check(engine.results[f"r{count}", 0])
        assert engine.unload("n")
    assert engine.held_bytes == (0, 0, 0)


def _end(engine: AdapterEngine, how: str) -> None:
    prompt = prompts([20])[0]
    if how == "waiting":
        engine.ask("r", prompt, "A")
        engine.core.abort("r")
    elif how == "while it loads":
        engine.ask("r", prompt, "A")
        engine.step()
        engine.core.abort("r")
    elif how == "prefill":
        engine.ask("r", prompt, "A")
        while not 0 < engine.core.scheduler.requests["r"].num_computed < 20:
            engine.step()
        engine.core.abort("r")
    elif how == "decode":
        engine.ask("r", prompt, "A")
        while not engine.results["r", 0].token_ids:
            engine.step()
        engine.core.abort("r")
    elif how == "refused":
        with pytest.raises(ValueError, match="prompt"):
            engine.ask("r", [1] * 1000, "A")
        with pytest.raises(ValueError, match="priority"):
            engine.add("r", prompt, adapter="A", priority=3)
    elif how == "one of four":
        engine.ask("r", prompt, "A", 8, n=4)
        while not engine.results["r", 3].token_ids:
            engine.step()
        engine.core.abort("r", 2)
    elif how == "four before they fork":
        engine.ask("r", prompt, "A", 8, n=4)
        engine.step()
        engine.core.abort("r")
    else:
        engine.ask("r", prompt, "A", n=4 if how == "n=4" else 1)
    engine.run()


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "how",
    [
        *("normal", "n=4", "waiting", "while it loads", "prefill", "decode", "refused", "one of four"),
        "four before they fork",
    ],
)
def test_l050_references_return_whatever_the_end(kit: Kit, how: str, delay: int) -> None:
    engine = AdapterEngine(kit, ["A"], chunk=7, delay=delay)
    _end(engine, how)
    while engine.core.adapters.store.loader.num_pending:
        engine.core.adapters.wait()
        engine.step()
    assert engine.info("A").num_refs == 0
    begin = time.monotonic()
    assert engine.unload("A")
    assert time.monotonic() - begin < 10
    assert engine.held_bytes == (0, 0, 0)
    engine.load("A", kit.adapter("A"))


def test_b039_unloading_while_it_is_used_drains(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, ["A"])
    engine.ask("r", prompts([5])[0], "A", 8, n=4)
    while not engine.results["r", 0].token_ids:
        engine.step()
    assert not engine.unload("A")
    (info,) = engine.core.adapters.infos()
    assert (info.name, info.state, info.num_refs) == ("A", AdapterState.DRAINING, 4)
    with pytest.raises(ValueError, match=r"^adapter: 'A' is unknown; no adapter is loaded"):
        engine.ask("late", [5], "A")
    engine.run()
    engine.check_all(oracles)
    assert engine.core.adapters.infos() == []
    assert engine.held_bytes == (0, 0, 0)


def test_unloading_what_is_being_loaded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AdapterEngine(kit, ["A", "B"], lora={"host_bytes": 1, "max_loaded": 1})
    plain = store_module.read_adapter
    monkeypatch.setattr(store_module, "read_adapter", lambda *a, **k: (time.sleep(0.2), plain(*a, **k))[1])
    engine.ask("r", prompts([5])[0], "A")
    engine.step()
    assert engine.info("A").state is AdapterState.LOADING
    engine.core.abort("r")
    engine.unload("A")
    engine.ask("b", prompts([5])[0], "B")
    engine.run()
    assert engine.results["b", 0].finish_reason == "length"
    assert engine.held_bytes[0] == engine.info("B").device_bytes


def test_l058_more_adapters_than_places_twice(kit: Kit, oracles: Oracles) -> None:
    sizes = AdapterEngine(kit, NAMES).core.adapters.infos()
    engine = AdapterEngine(
        kit, NAMES, lora={"max_loaded": 1, "host_bytes": sum(info.num_bytes for info in sizes) // 2}
    )
    for turn, names in enumerate((NAMES, NAMES, reversed(NAMES))):
        for name in names:
            engine.ask(f"{name}{turn}", prompts([6])[0], name, 3)
            engine.run()
    engine.check_all(oracles)
    for name in NAMES:
        engine.ask(f"{name} at once", prompts([6])[0], name, 3)
    engine.run()
    engine.check_all(oracles)
    stats = engine.core.gauges()
    assert stats["num_adapter_host_hits"] > 0
    assert stats["num_adapter_disk_reads"] > 0
    assert stats["adapter_host_bytes"] <= engine.core.adapters.store.host.capacity


def test_l064_bytes_are_those_of_the_adapters(kit: Kit) -> None:
    engine = AdapterEngine(kit, NAMES)
    expected = 0
    for name in NAMES:
        engine.ask(name, prompts([4])[0], name, 1)
        engine.run()
        expected += engine.info(name).device_bytes
        assert engine.held_bytes[:2] == (expected, expected)
    assert engine.info("B").device_bytes < engine.info("A").device_bytes / 10


def test_the_device_limit_holds_at_every_step(kit: Kit, oracles: Oracles) -> None:
    sizes = {info.name: info.device_bytes for info in AdapterEngine(kit, NAMES).core.adapters.infos()}
    limit = max(sizes.values()) + min(sizes.values())
    engine = AdapterEngine(kit, NAMES, lora={"device_bytes": limit})
    for count in range(18):
        engine.ask(f"r{count}", prompts([4], seed=count)[0], NAMES[count % 6], 3)
    while engine.core.has_work:
        engine.step()
        assert engine.held_bytes[1] <= limit
    engine.check_drained()
    engine.check_all(oracles)


def test_b040_l056_bad_adapters_disturb_nobody(kit: Kit, oracles: Oracles, tmp_path: Path) -> None:
    engine = AdapterEngine(kit, ["A"], roots=[tmp_path])
    engine.ask("running", prompts([5])[0], "A", 30)
    engine.step()
    truncated = kit.copy("B", tmp_path / "truncated") / "adapter_model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-7])
    (kit.copy("B", tmp_path / "no-config") / "adapter_config.json").unlink()
    (kit.copy("B", tmp_path / "no-weights") / "adapter_model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    for name in ("truncated", "no-config", "no-weights", "empty", "nothing"):
        with pytest.raises(ValueError, match=name):
            engine.load("bad", name)
        engine.step()
        with pytest.raises(ValueError, match=r"^adapter: 'bad' is unknown"):
            engine.ask("bad", [5], "bad")
    engine.load("good", kit.adapter("B"))
    engine.ask("good", prompts([5])[0], "good")
    engine.run()
    engine.check_all(oracles, good="B")


@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_random_cycles(kit: Kit, oracles: Oracles, tmp_path: Path, seed: int) -> None:
    """50 for each seed: load, replace, run, unload and abort at random; everything comes back."""
    rng = random.Random(seed)
    engine = AdapterEngine(
        kit,
        lora={"max_loaded": rng.choice([1, 2, 3]), "host_bytes": rng.choice([1, 60_000, 10**9])},
        chunk=rng.choice([4, 16]),
        delay=seed % 2,
        preempt_every=rng.choice([None, 5]),
        checksum=False,
    )
    served: dict[str, str | None] = {}
    holds: dict[str, str] = {}  # name -> the kit's name of what it leads to
    aborted: set[str] = set()
    for count in range(50):
        action = rng.choice(["load", "load", "run", "run", "run", "unload", "abort"])
        if action == "load":
            name, content = rng.choice("xyz"), rng.choice(NAMES)
            engine.load(name, kit.adapter(content))
            holds[name] = content
        elif action == "unload" and holds:
            name = rng.choice(sorted(holds))
            engine.unload(name)
            del holds[name]
        elif action == "run":
            name = rng.choice([None, *sorted(holds)])
            served[f"r{count}"] = None if name is None else holds[name]
            engine.ask(
                f"r{count}",
                prompts([rng.randint(1, 9)], seed=count)[0],
                name,
                rng.randint(1, 6),
                n=rng.choice([1, 1, 2]),
            )
        elif action == "abort" and served:
            request_id = rng.choice(sorted(served))
            engine.core.abort(request_id)
            aborted.add(request_id)
        for _ in range(rng.randint(0, 3)):
            engine.step()
    engine.run()
    for (request_id, _), result in engine.results.items():
        if result.finish_reason == "length":
            oracles[served[request_id]].check(result)
        else:
            assert request_id in aborted
    for name in holds:
        assert engine.unload(name)
    while engine.core.adapters.store.loader.num_pending:
        engine.core.adapters.wait()
        engine.core.step()
    assert engine.held_bytes == (0, 0, 0)
    assert engine.core.adapters.infos() == []
    assert engine.core.adapters.store.versions == {}


# ---- when steps fail


def test_a_step_that_fails_keeps_adapters_where_they_are(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, ["A", "B"], lora={"max_loaded": 1}, delay=1)
    engine.ask("a", prompts([5])[0], "A", 8, n=2)
    engine.ask("b", prompts([5])[0], "B", 8)
    while not engine.results["a", 0].token_ids:
        engine.step()
    plain = engine.executor.runner.execute

    def fail(step: Any) -> Any:
        engine.executor.runner.execute = plain
        raise RuntimeError("no")

    engine.executor.runner.execute = fail
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    tokens = {request.id: list(request.output_ids) for request in engine.core.scheduler.requests.values()}
    assert tokens["a"]
    while engine.core.has_work:
        engine.step()
    engine.check_drained()
    for key in (("a", 0), ("a", 1), ("b", 0)):
        result = engine.results[key]
        name = key[0].upper()
        assert result.token_ids == oracles[name].greedy(result.prompt_ids, 8)


@pytest.mark.parametrize("where", ["place_adapter", "adapter_loaded"])
def test_an_interruption_while_an_adapter_is_placed_loses_no_load(
    kit: Kit, oracles: Oracles, where: str
) -> None:
    engine = AdapterEngine(kit, ["A"])
    owner = engine.executor if where == "place_adapter" else engine.core.scheduler
    plain = getattr(owner, where)

    def interrupted(*args: Any) -> None:
        setattr(owner, where, plain)
        plain(*args)
        raise KeyboardInterrupt

    setattr(owner, where, interrupted)
    engine.ask("a", prompts([5])[0], "A")
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - somewhere in between
        while engine.core.has_work:
            engine.step()
    engine.run()
    engine.check_all(oracles)


# ---- aLoRA


def test_the_last_occurrence_counts() -> None:
    assert last_occurrence([7, 8, 9, 1, 7, 8, 9, 2], [7, 8, 9]) == 4
    assert last_occurrence([7, 7, 8], [7, 8]) == 1
    assert last_occurrence([7, 8], [7, 8, 9]) is None
    assert last_occurrence([7, 8, 9], [7, 8, 9]) == 0
    assert last_occurrence([], [7]) is None


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("preempt_every", [None, 4])
def test_alora_is_on_from_the_invocation(kit: Kit, chunk: int, preempt_every: int | None) -> None:
    before, after = prompts([9, 6], seed=4)
    before = [token if token not in (7, 8, 9) else 10 for token in before]
    cases = {
        "once": [*before, 7, 8, 9, *after],
        "twice": [*before, 7, 8, 9, *before, 7, 8, 9],
        "first": [7, 8, 9, *before],
        "never": [*before, 7, 8, *before],
    }
    engine = AdapterEngine(kit, ["alora"], chunk=chunk, preempt_every=preempt_every)
    for name, prompt in cases.items():
        engine.ask(name, prompt, "alora", 5, prompt_logprobs=1)
    results = engine.run()
    for name in cases:
        result = results[name, 0]
        ids = [*result.prompt_ids, *result.token_ids[:-1]]
        expected = activated_logits(kit.base, kit.adapter("alora"), ids)
        drawn = expected[len(result.prompt_ids) - 1 :]
        assert (torch.stack(result.logits) - drawn).abs().max() < 1e-4, name
        assert result.token_ids == drawn.argmax(-1).tolist()
        scored = torch.tensor([each.logprobs[0] for each in result.prompt_logprobs])
        wanted = torch.log_softmax(expected, -1)[range(len(result.prompt_ids) - 1), result.prompt_ids[1:]]
        assert (scored - wanted).abs().max() < 1e-4, name


def test_alora_positions_before_the_invocation_are_the_base_models_bits(kit: Kit) -> None:
    prompt = [*prompts([9], seed=4)[0], 7, 8, 9, 5]
    start = len(prompt) - 4
    scored = []
    for adapter in ("alora", None):
        engine = AdapterEngine(kit, ["alora"])
        engine.ask("r", prompt, adapter, 2, prompt_logprobs=0)
        result = engine.run()["r", 0]
        scored.append([each.logprobs[0] for each in result.prompt_logprobs])
    assert scored[0][:start] == scored[1][:start]
    assert scored[0][start:] != scored[1][start:]


def test_alora_without_an_invocation_is_the_base_and_needs_no_slot(kit: Kit, oracles: Oracles) -> None:
    engine = AdapterEngine(kit, ["alora"])
    engine.ask("r", [5, 6, 7, 8], "alora")
    engine.run()
    engine.check_all(oracles, r=None)
    stats = engine.core.gauges()
    assert stats["num_adapter_loads"] == 0
    assert stats["adapters"]["alora"]["num_finished"] == 1


# ---- pins


def test_a_pin_that_is_refused_changes_nothing(kit: Kit) -> None:
    engine = AdapterEngine(kit, ["A", "B", "C"], lora={"max_loaded": 2})
    adapters = engine.core.adapters
    adapters.pin("A")
    with pytest.raises(ValueError, match=r"^adapter: 'B' can't be pinned: it would pin the last of 2 slots$"):
        adapters.pin("B")
    assert adapters.num_loading == 1  # A's
    assert "B" not in [info.name for info in adapters.infos() if info.state == "loading"]
    engine.core.close()


def test_a_pin_leaves_room_for_one_other_at_least(kit: Kit) -> None:
    """By bytes, too: for the smallest that may be named and isn't pinned itself."""
    sizes = {
        info.name: info.device_bytes for info in AdapterEngine(kit, ["A", "B", "D"]).core.adapters.infos()
    }
    assert sizes["B"] < sizes["D"] < sizes["A"]
    limit = sizes["A"] + sizes["B"]
    engine = AdapterEngine(kit, ["A", "B", "D"], lora={"device_bytes": limit})
    adapters = engine.core.adapters
    adapters.pin("A")  # B fits beside it, D doesn't
    adapters.pin("A")
    with pytest.raises(ValueError, match="pinned adapters included"):
        engine.ask("d", [5], "D")
    with pytest.raises(ValueError, match=r"^adapter: 'B' can't be pinned: no other adapter would fit .*smal"):
        adapters.pin("B")
    assert not adapters.info("B").is_pinned
    engine.unload("B")
    adapters.unpin("A")
    with pytest.raises(ValueError, match=f"smallest has {sizes['D']:,}, device_bytes is {limit:,}"):
        adapters.pin("A")
    engine.unload("D")
    adapters.pin("A")  # where there is no other, nobody is in need of room
    engine.core.close()


def test_other_content_under_a_pinned_name_is_refused(kit: Kit, tmp_path: Path) -> None:
    """The pin would be lost: it is of the content."""
    engine = AdapterEngine(kit, ["A"], roots=[tmp_path])
    adapters = engine.core.adapters
    adapters.pin("A")
    with pytest.raises(ValueError, match=r"^adapter 'A': 'A' is pinned, .*unpin_adapter first$"):
        engine.load("A", kit.adapter("B"))
    assert adapters.info("A").is_pinned
    engine.load("A", kit.copy("A", tmp_path / "equal"))
    engine.load("also", kit.adapter("A"))
    engine.load("A", kit.adapter("B"))  # the content keeps its pin by its other name
    assert [adapters.info(name).is_pinned for name in ("A", "also")] == [False, True]
    adapters.unpin("also")
    engine.load("also", kit.adapter("B"))
    engine.core.close()


def test_a_pin_says_when_loads_are_in_the_way(kit: Kit) -> None:
    engine = AdapterEngine(kit, ["A", "B", "C"], lora={"max_loaded": 2})
    for name in ("A", "B"):
        engine.ask(name, [1, 2], name)
    engine.core.scheduler.schedule()
    with pytest.raises(
        ValueError, match=r"^adapter: 'C' can't be pinned now: .*some by adapters that are still"
    ):
        engine.core.adapters.pin("C")
    engine.core.close()


# ---- numbers


def test_counters_by_adapter(kit: Kit) -> None:
    engine = AdapterEngine(kit, ["A", "B"])
    engine.ask("a", prompts([5])[0], "A", 4, n=2)
    engine.ask("base", prompts([6])[0], None, 3)
    engine.run()
    counted = engine.core.gauges()["adapters"]
    assert (counted["A"]["num_finished"], counted["A"]["num_generated_tokens"]) == (2, 8)
    assert counted["A"]["num_computed_tokens"] == 5 + 2 * 3
    assert counted["(base)"]["num_generated_tokens"] == 3
    assert "B" not in counted
    with pytest.raises(ValueError, match="unknown"):
        engine.ask("x", [5], "unknown")
    assert "unknown" not in engine.core.gauges()["adapters"]
