"""Formats through the whole engine: Python API and command line, on the demo model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from hybridserve import LLM, SamplingParams
from hybridserve.cli import main
from hybridserve.config.schema import GemmName, MoEName
from hybridserve.engine.convert import quantize_checkpoint
from hybridserve.kernels.gemm.native import Native
from hybridserve.kernels.registry import Capabilities, candidates
from hybridserve.models.hub import resolve_model
from tests.harness.quantized import SCALED, QuantizedModel, dequantized_copy, everything

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


def test_several_continuations_and_adapters(tmp_path: Path) -> None:
    """n > 1 forks and adapters come and go, as in an engine of the plain model whose weights are codes times
    scales: log-probabilities of what was drawn, and texts."""
    path = resolve_model("demo")
    dequantized = tmp_path / "plain"
    dequantized_copy(QuantizedModel(path, everything("int8")), path, dequantized)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(path / name, dequantized / name)
    adapters = {name: str(path / "adapters" / name) for name in ("scripture", "shakespeare")}
    params = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=8, ignore_eos=True, logprobs=0)
    names = [None, "scripture", "shakespeare"]
    common: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 16, "kernels": {"gemm": "exact"}}
    runs = []
    for model, options in (
        ("demo", {"quantization": {"format": "int8"}}),
        (dequantized, {"lora": {"adapters": adapters}}),
    ):
        with engine(model, **common, **options) as llm:
            outputs = llm.generate(PROMPTS, params, adapter=names)
        runs.append([each for output in outputs for each in output.outputs])
    assert len({each.text for each in runs[0]}) == 9
    assert [each.text for each in runs[0]] == [each.text for each in runs[1]]
    for one, other in zip(*runs, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_exact_is_a_backend_that_rounds_nothing(tmp_path: Path) -> None:
    """What tells it from the default path is how near it is to the plain model of the same numbers."""
    path = resolve_model("demo")
    plain = dequantized_copy(QuantizedModel(path, everything("int8")), path, tmp_path / "plain")
    shutil.copy(path / "tokenizer.json", plain / "tokenizer.json")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    text = PROMPTS[0] * 20

    def logprobs(llm: LLM) -> torch.Tensor:
        (output,) = llm.generate([text], params)
        assert output.prompt_logprobs is not None
        return torch.tensor([next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]])

    with engine(plain, dtype="float32") as llm:
        expected = logprobs(llm)
    with engine(dtype="float32", quantization={"format": "int8"}, kernels={"gemm": "exact"}) as llm:
        assert "activations as they are" in llm.plan.table()
        for op in ("gemm", "moe"):
            chosen = next(b for b in candidates(op) if b.name == llm.plan.backends[op].name)
            assert not chosen.rounding
        exact = (logprobs(llm) - expected).abs().max()
    with engine(dtype="float32", quantization={"format": "int8"}) as llm:
        rounding = {b.name: b.rounding for b in candidates("gemm")}[llm.plan.backends["gemm"].name]
        shown = f"activations rounded {rounding}" if rounding else "activations as they are"
        assert shown in llm.plan.table()
        default = (logprobs(llm) - expected).abs().max()
    assert exact <= 1e-4
    assert default <= 1e-2
    if rounding:
        assert default > 3 * exact


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--targets", "experts", "--kernels.moe", "torch_native"),
            "; activations as they are; a product of ex",
        ),
        (
            ("--targets", "in_proj", "--kernels.gemm", "torch_native"),
            "; activations as they are; a product of pr",
        ),
        (("--targets", "in_proj", "--kernels.moe", "torch_native"), "activations rounded to 15 bits a row"),
        (
            ("--kernels.gemm", "torch_native"),
            "activations of projections as they are, of experts rounded to 15 bits a row",
        ),
        (
            ("--kernels.gemm", "reference"),
            "a product of projections (reference) makes a plain copy of its whole weight",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_inspect_speaks_of_what_is_quantized(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if Native.why_not(Capabilities("cpu", "bfloat16", "int8")) is not None:
        pytest.skip("no C compiler")
    with pytest.raises(SystemExit):
        main(["inspect", "demo", "--format", "int8", *options])
    shown = capsys.readouterr().out
    assert says in " ".join(shown.split())


def test_a_plan_for_other_hardware_knows_no_backend(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "demo", "--format", "int8", "--hardware", "h100-80gb"])
    shown = capsys.readouterr().out
    assert "of the parameters; how it is computed there is not known" in shown
    assert "plain copy" not in shown


@pytest.mark.parametrize("target", ["re:(", "re:(a", "re:*", r"re:(?=x)y", "re:a{9}"])
def test_a_bad_pattern_is_one_line(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of who starts it and of who made the checkpoint."""
    with pytest.raises(SystemExit) as status:
        main(["plan", "demo", "--format", "int8", "--targets", target])
    shown = capsys.readouterr().err
    assert status.value.code == 2
    assert shown.startswith(f"hybridserve: quantization.targets: {target!r}: ")
    assert len(shown.splitlines()) == 1
    quantize_checkpoint(resolve_model("demo"), tmp_path / "out", "int8", None)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    found["quantization_config"]["ignore"].append(target)
    (tmp_path / "out" / "config.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit) as status:
        main(["plan", str(tmp_path / "out")])
    shown = capsys.readouterr().err
    assert status.value.code == 2
    assert shown.startswith(f"hybridserve: config.json: quantization_config: {target!r}: ")
    assert len(shown.splitlines()) == 1


def test_a_pattern_that_others_match_forever(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["plan", "demo", "--format", "int8", "--targets", r"re:((\w|\.|\d)+)+!"])
    assert status.value.code == 2
    assert "names no module of this model" in capsys.readouterr().err


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
