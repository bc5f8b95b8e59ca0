"""`hybridserve plan` for hardware that isn't here: what it prints, draws and refuses; and that a plan for
this machine is what is then allocated."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.cli import main
from hybridserve.config.loader import load_config
from hybridserve.engine import arena_plan, planner
from hybridserve.engine.executor import LocalExecutor
from hybridserve.engine.plan_plot import WEIGHTS
from hybridserve.engine.planner import make_plan, plan_model
from hybridserve.engine.roofline import share_read
from hybridserve.kernels import native
from hybridserve.models.hub import resolve_model
from hybridserve.models.shapes import load_shape
from tests.harness.models import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = ["ai21labs/AI21-Jamba-Large-1.7", "--hardware", "h100-80gb"]
INT8 = ["--parallel.tensor", "8", "--quantization.format", "int8"]
ADAPTERS = ["--lora.allow_runtime_loading", "true", "--lora.roots", "/srv/adapters"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def run_plan(*arguments: object, status: int = 0) -> str:
        with pytest.raises(SystemExit) as exit_status:
            main(["plan", *map(str, arguments)])
        shown = capsys.readouterr()
        assert exit_status.value.code == status, shown.err
        return shown.out if status == 0 else shown.err

    return run_plan


def test_nothing_of_this_machine_is_asked(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("this machine was asked")

    for name in ("total_memory", "available_memory"):
        monkeypatch.setattr(arena_plan, name, never)
        monkeypatch.setattr(planner, name, never)
    monkeypatch.setattr(native, "prepare", never)
    monkeypatch.setattr("socket.getaddrinfo", never)
    shown = run(*LARGE, *INT8)
    assert "planned from the shape of jamba-large" in shown
    assert "8 x H100 80 GB, 79.6 GiB each; not this machine" in shown
    assert "projected for 8 x H100 80 GB" in shown
    assert "nothing was measured" in shown
    with pytest.raises(AssertionError, match="this machine was asked"):
        run("demo")


def test_json_has_everything(run) -> None:
    plan = json.loads(run(*LARGE, *INT8, "--json"))
    assert plan["shape"] == "jamba-large"
    assert plan["hardware"] == "h100-80gb"
    assert plan["device"] == "cuda"
    assert plan["weight_bytes_per_gpu"] == pytest.approx(46.7 * 2**30, rel=5e-3)
    assert plan["kv_bytes_per_token_per_gpu"] == 4608
    (stage,) = plan["stages"]
    assert sum(sum(formats.values()) for formats in stage["weights"].values()) == plan["weight_bytes_per_gpu"]
    assert set(stage["weights"]) == {"experts", "mlp", "mamba", "attention", "embeddings", "other"}
    assert set(stage["workspace"]) == {"runtime", "activations", "graphs", "collectives"}
    assert [row["tokens"] for row in plan["capacity"]] == [1024 * 2**power for power in range(9)]
    counts = [row["sequences"] for row in plan["capacity"]]
    assert counts == sorted(counts, reverse=True)
    decode = plan["decode"]
    assert decode["projected"] is True
    assert [step["sequences"] for step in decode["steps"]] == [2**power for power in range(10)]
    assert [step["fits"] for step in decode["steps"]] == [True] * 9 + [False]
    for step in decode["steps"]:
        assert step["projected_tokens_per_second"] < 0.751 * step["roofline_tokens_per_second"]


def test_the_arena_is_what_is_left(run) -> None:
    arguments = [*LARGE, *INT8, "--json", "--memory_fraction", "0.92", "--max_num_seqs", "64"]
    plan = json.loads(run(*arguments))
    (stage,) = plan["stages"]
    taken = stage["weight_bytes_per_gpu"] + sum(stage["workspace"].values())
    left = 0.92 * 81_559 * 2**20 - taken
    assert left - plan["slab_bytes"] <= plan["arena_bytes_per_gpu"] <= left
    with_adapters = json.loads(run(*arguments, *ADAPTERS, "--device_bytes", "4GiB"))
    less = plan["arena_bytes_per_gpu"] - with_adapters["arena_bytes_per_gpu"]
    recordings = 7 * 32 * 2**20  # of 1, 2, 4, 8, 16, 32 and 64 sequences with adapters
    assert less == pytest.approx(4 * 2**30 + recordings, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [*LARGE, "--tensor", "8"],
            "92.8 GiB of weights and 3.9 GiB of workspace take; what would fit: quantization.format: int8, "
            "or hardware: h200-141gb, or parallel.tensor: 16, or parallel.pipeline: 2",
        ),
        (
            ["jamba-mini", "--hardware", "a100-40gb", "--tensor", "2"],
            "what would fit: quantization.format: int8, or hardware: h100-80gb, or parallel.tensor: 4, or",
        ),
        (["jamba-large", "--hardware", "l40s"], "742.4 GiB of weights"),
        (
            ["jamba-large", "--hardware", "h100-80gb"],
            "what would fit: parallel.tensor: 8 with quantization.format: int8, or parallel.tensor: 16",
        ),
        (
            [*LARGE, *INT8, "--max_num_batched_tokens", "1000000"],
            "what would fit: scheduler.max_num_batched_tokens: 65536",
        ),
        (
            ["jamba-mini", "--hardware", "h100-80gb", "--format", "int8", "--memory_bytes", "40GiB"],
            "one H100 80 GB; what would fit: cache.memory_bytes: 19.2GiB, or hardware: h200-141gb, or",
        ),
        (
            ["jamba-mini", "--hardware", "h100-80gb", "--format", "int8", "--memory_fraction", "0.66"],
            "of workspace, which holds one sequence of",
        ),
        (["jamba-3b", "--device", "cuda"], "for one that is elsewhere, say which: hardware: h100-80gb"),
        (["jamba-3b", "--device", "cpu", "--hardware", "l40s"], "hardware: l40s is not device: cpu"),
        (["jamba-3b", "--hardware", "h100"], "hardware: 'h100': should be 'auto', 'h100-80gb'"),
        (
            ["jamba-3b", "--hardware", "l40s", "--tensor", "8"],
            "20 attention heads; sizes that work here: 1, 2, 4",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(run, arguments: list[str], message: str) -> None:
    shown = run(*arguments, status=2)
    assert message in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["jamba-large", "--memory_bytes", "10GiB"],
            "10.0 GiB, beside 742.4 GiB of weights, is more than the 24.0 GiB of memory that this machine",
        ),
        (["jamba-large"], "model: 742.4 GiB of weights don't fit into the 4.0 GiB of memory that"),
        (["jamba-3b"], "has free; what would fit: quantization.format: int8"),
        (
            ["jamba-3b", "--memory_bytes", "20GiB"],
            "what would fit: cache.memory_bytes: 18.3GiB, or quantization.format: int8",
        ),
        (
            ["jamba-3b", "--memory_bytes", "10GiB", "--tensor", "2", "--executor", "mp"],
            "cache.memory_bytes: 10.0 GiB x 2 ranks, beside 5.6 GiB of weights,",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hardware", ["auto", "cpu"])
def test_weights_and_arenas_fit_into_this_machine_together(
    run, monkeypatch: pytest.MonkeyPatch, hardware: str, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(arena_plan, "total_memory", lambda: 24 << 30)
    monkeypatch.setattr(arena_plan, "available_memory", lambda: 4 << 30)
    shown = run(*arguments, "--hardware", hardware, status=2)
    assert message in shown
    assert len(shown.splitlines()) == 1


def test_a_suggestion_fits(run) -> None:
    run(*LARGE, "--tensor", "8", status=2)
    for change in (
        ["--tensor", "16"],
        ["--hardware", "h200-141gb"],
        ["--pipeline", "2"],
        ["--format", "int8"],
    ):
        run(*LARGE, "--tensor", "8", *change)


def test_an_engine_does_not_start_for_hardware_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--device", "cuda"], ["--hardware", "h100-80gb"]):
        with pytest.raises(SystemExit) as status:
            main(["generate", "demo", "--prompt", "x", *options])
        assert status.value.code == 2
        assert f"{options[0][2:]}: {options[1]}: torch" in capsys.readouterr().err


def test_a_cpu_that_is_named_has_a_projection(run) -> None:
    assert "not projected: this machine's speed isn't known" in run("demo")
    shown = run("demo", "--hardware", "cpu")
    assert "projected for 1 x CPU" in shown
    assert "not projected" not in shown


def test_plot(run, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, arguments in (
        ("large", [*LARGE, *INT8]),
        ("stages", [*LARGE, "--tensor", "8", "--pipeline", "2"]),
    ):
        file = tmp_path / f"{name}.png"
        run(*arguments, "--plot", file)
        with image.open(file) as picture:
            assert picture.size == (1800, 780)
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
    assert "--plot" in run("demo", "--plot", tmp_path / "plan.unknown", status=2)
    assert "is a directory" in run("demo", "--plot", tmp_path, status=2)
    assert not tmp_path.with_suffix(".png").exists()


def test_a_part_has_its_color_in_every_plot(run, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, arguments in (("experts", ["jamba-mini"]), ("mlp", ["jamba-3b"])):
        run(*arguments, "--hardware", "h200-141gb", "--plot", tmp_path / "plan.png")
        with image.open(tmp_path / "plan.png") as picture:
            colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
        assert tuple(bytes.fromhex(WEIGHTS[name][1:])) in colors


def test_stages_that_are_alike_share_a_column(run) -> None:
    shown = run(*LARGE, "--pipeline", "72")
    assert max(map(len, shown.splitlines())) < 150
    assert "layer 0   stages 1,3..69   26 of 2 to 70   stages 4,12..68   layer 71" in shown
    assert "stages 4,12..68  a layer each: weights 1.4 GiB" in shown
    two = run(*LARGE, "--tensor", "8", "--pipeline", "2")
    assert "layers 0-35   layers 36-71" in two
    assert "stage 1   layers 36 to 71: weights" in two


def test_small_models_are_told_in_small_units(run) -> None:
    shown = run("demo", "--hardware", "cpu", "--memory_bytes", "16MiB")
    assert "MiB a rank" in shown
    assert "experts, bfloat16" in shown
    assert "2.25" in shown


def test_share_of_experts_that_are_read() -> None:
    assert share_read(1.0, 7) == 1
    assert share_read(0.0, 7) == 0
    assert share_read(2 / 16, 1) == pytest.approx(2 / 16)
    assert share_read(2 / 16, 8) == pytest.approx(1 - (7 / 8) ** 8)


def tensors_of(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object holds, through whatever it is made of."""
    if id(value) in seen or isinstance(value, str | int | float | type | None):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, seen)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_of(item, seen)
    elif type(value).__module__.startswith("hybridserve"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        names = [field.name for field in fields(value)] if is_dataclass(value) else slots
        for name in {*names, *getattr(value, "__dict__", {})}:
            yield from tensors_of(getattr(value, name, None), seen)


def allocated_bytes(model: Any) -> int:
    storages = {}
    for tensor in tensors_of(model, set()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("weights", ["none", "int8", "fp8"])
@pytest.mark.parametrize("family", ["demo", "jamba", "bamba", "mamba", "llama"])
def test_planned_and_allocated_bytes_agree(family: str, weights: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256} | ({} if family == "mamba" else {"intermediate_size": 512})
    name = family
    if family != "demo":
        save_model(family, tmp_path, 0, dtype=torch.bfloat16, **wide)
        name = str(tmp_path)
    options = {} if weights == "none" else {"format": weights}
    path = resolve_model(name)
    plan = make_plan(load_config(name, overrides={"memory_bytes": 1 << 24, **options}), path)
    executor = LocalExecutor(path, plan)
    worker = executor.worker
    assert allocated_bytes(worker.runner.model) == pytest.approx(plan.weight_bytes, rel=0.01)
    assert worker.arena.buffer.nbytes == plan.arena_bytes == plan.stages[0].arena_bytes
    executor.close()


def test_ranks_together_hold_the_model(tmp_path: Path) -> None:
    """What ranks hold in common, routers, norms and KV heads, is counted on each."""
    shape = load_shape("jamba-mini")
    whole, eighth = (
        plan_model(load_config("jamba-mini", overrides={"hardware": "h200-141gb", "tensor": size}), shape)
        for size in (1, 8)
    )
    common = whole.stages[0].weights_by_part()["other"]["bfloat16"]
    assert 0 < 8 * eighth.weight_bytes - whole.weight_bytes < 20 * common
