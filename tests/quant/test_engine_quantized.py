"""Formats through the whole engine: Python API and command line, on the demo model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.cli import main
from hybridserve.config.schema import GemmName, MoEName
from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.kernels.registry import candidates
from hybridserve.models.hub import resolve_model
from tests.harness.quantized import SCALED

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The people of the", "It is a truth", "The climate is"]


def engine(model: str | Path = "demo", **options: Any) -> LLM:
    return LLM(model, memory_bytes="64MiB", max_model_len=256, **options)


def texts(llm: LLM, **options: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, **options)]


@pytest.mark.parametrize("format_name", SCALED)
def test_to_disk_and_while_loading_write_the_same_texts(format_name: str, tmp_path: Path) -> None:
    quantize_checkpoint(resolve_model("demo"), tmp_path / "out", format_name, None)
    with engine(quantization={"format": format_name}) as online, engine(tmp_path / "out") as offline:
        assert texts(online) == texts(offline)
        assert online.plan.weight_bytes == offline.plan.weight_bytes < 0.65 * 5_169_728
        assert f"quantization  {format_name} while loading, 76.6%" in online.plan.table()
        assert f"quantization  {format_name} as the checkpoint is, 76.6%" in offline.plan.table()


def test_several_continuations_and_adapters() -> None:
    """n > 1 forks, adapters come and go, and a second run says the same."""
    params = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=8, ignore_eos=True)
    names = [None, "scripture", "shakespeare"]
    runs = []
    for _ in range(2):
        with engine(quantization={"format": "int8"}, max_num_batched_tokens=16) as llm:
            outputs = llm.generate(PROMPTS, params, adapter=names)
            runs.append([each.text for output in outputs for each in output.outputs])
            assert len(set(runs[-1])) == 9
            assert texts(llm, adapter="scripture") != texts(llm)
    assert runs[0] == runs[1]


def test_exact_is_a_backend_that_rounds_nothing() -> None:
    with engine(quantization={"format": "int8"}, kernels={"gemm": "exact"}) as llm:
        assert "activations as they are" in llm.plan.table()
        for op in ("gemm", "moe"):
            chosen = next(b for b in candidates(op) if b.name == llm.plan.backends[op].name)
            assert not chosen.rounding
        exact = texts(llm)
    with engine(quantization={"format": "int8"}) as llm:
        rounding = {b.name: b.rounding for b in candidates("gemm")}[llm.plan.backends["gemm"].name]
        shown = f"activations rounded {rounding}" if rounding else "activations as they are"
        assert shown in llm.plan.table()
        assert texts(llm) == exact


def test_every_backend_can_be_asked_for() -> None:
    for op, names in (("gemm", GemmName), ("moe", MoEName)):
        assert {backend.name for backend in candidates(op)} == set(get_args(names)) - {"auto", "exact"}


def test_inspect_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["inspect", "demo", "--format", "int8-w8a8", "--targets", "mlp"])
    assert status.value.code == 0
    shown = capsys.readouterr().out
    assert "int8-w8a8 while loading, 57.5% of the parameters; activations rounded to int8 a row" in shown
    assert "kept: dt_proj, in_proj, k_proj, o_proj, out_proj, q_proj, router, v_proj, x_proj" in shown


def test_a_missing_package_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    found = importlib.util.find_spec

    def find(name: str, *more: Any) -> Any:
        return None if name == "bitsandbytes" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(SystemExit) as status:
        main(["generate", "demo", "--prompt", "x", "--format", "bnb-nf4"])
    assert status.value.code == 2
    assert capsys.readouterr().err == (
        "hybridserve: quantization.format: bnb-nf4 can't be used here: bitsandbytes is not installed: "
        "pip install 'hybridserve[quant]'\n"
    )
