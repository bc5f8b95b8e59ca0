"""Every file in configs/: loaded, planned, and started where it is for a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridserve import LLM, SamplingParams
from hybridserve.config.loader import ConfigError, load_config
from hybridserve.engine.alternatives import plan_or_suggest
from hybridserve.models.hub import resolve_config

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
GPU = {
    "bamba-9b-1xa100": ("bamba-9b", 1, 18.2),
    "jamba-3b-1gpu": ("jamba-3b", 1, 5.65),
    "jamba-large-2x8xh100-bf16": ("jamba-large", 16, 46.4),
    "jamba-large-8xh100-int8": ("jamba-large", 8, 46.7),
    "jamba-large-8xh200-int8": ("jamba-large", 8, 46.7),
    "jamba-mini-1xh100-int8": ("jamba-mini", 1, 48.7),
    "jamba-mini-2xa100": ("jamba-mini", 2, 48.0),
    "multi-lora": ("jamba-mini", 1, 48.7),
}
"""File -> (shape, ranks, GiB of weights on each)."""
CPU = ("demo-cpu", "demo-lora", "demo-tp2-cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_no_file_is_left_out() -> None:
    assert {file.stem for file in FILES} == {*GPU, *CPU}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_setting_is_explained_or_explains_itself(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("# ")
    settings = [line for line in lines if line and not line.startswith("#")]
    assert sum("# " in line for line in settings) >= len(settings) // 5
    assert max(map(len, lines)) <= 150


@pytest.mark.parametrize(("name", "expected"), GPU.items())
def test_gpu_deployments_fit(name: str, expected: tuple[str, int, float]) -> None:
    shape, num_ranks, gibibytes = expected
    config = load_config(file=CONFIGS / f"{name}.yaml", with_keys=False)
    hf_config, found = resolve_config(config.model)
    assert found == shape
    plan = plan_or_suggest(config, hf_config, shape=found)
    assert plan.device == "cuda"
    assert plan.parallel.num_ranks == num_ranks
    assert plan.weight_bytes == pytest.approx(gibibytes * 2**30, rel=5e-3)
    assert plan.max_model_len == config.max_model_len
    assert plan.fits(1, plan.max_model_len)
    assert plan.fits(plan.max_num_seqs, 512), "max_num_seqs means something"
    for stage in plan.stages:
        assert plan.hardware.memory_bytes is not None
        assert plan.bytes_taken(stage) <= config.cache.memory_fraction * plan.hardware.memory_bytes
    with pytest.raises(ValueError, match=r"hardware: .*: torch .*; `hybridserve plan` shows what it would"):
        LLM(config=CONFIGS / f"{name}.yaml", model="demo", max_model_len=1024)


@pytest.mark.parametrize(("name", "expected"), GPU.items())
def test_gpu_deployments_are_served_to_those_with_keys(
    name: str, expected: tuple[str, int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = CONFIGS / f"{name}.yaml"
    with pytest.raises(ConfigError, match="HYBRIDSERVE_API_KEY is not set"):
        load_config(file=file)
    monkeypatch.setenv("HYBRIDSERVE_API_KEY", "a-key")
    monkeypatch.setenv("HYBRIDSERVE_ADMIN_KEY", "another-key")
    config = load_config(file=file)
    assert config.served_name == expected[0]
    assert [key.get_secret_value() for key in config.server.api_keys] == ["a-key"]
    assert bool(config.server.admin_keys) == config.lora.allow_runtime_loading


def test_what_comments_say_of_the_int8_deployment() -> None:
    file = CONFIGS / "jamba-large-8xh100-int8.yaml"
    text = file.read_text()
    config = load_config(file=file, with_keys=False)
    hf_config, _ = resolve_config(config.model)

    def weights(**quantization: object) -> str:
        changed = config.model_copy(
            update={
                "quantization": config.quantization.model_copy(update=quantization),
                "hardware": "h200-141gb",
            }
        )
        return f"{plan_or_suggest(changed, hf_config).weight_bytes / 2**30:.1f} GiB"

    assert f"bfloat16 would be {weights(format='none', targets=None)} a GPU" in text
    assert f"made while loading, {weights()}" in text
    assert f"`experts` alone: {weights(targets=('experts',))}" in text
    plan = plan_or_suggest(config, hf_config)
    states = plan.max_num_seqs * plan.layout.bytes_per_slot
    assert f"{states / 2**30:.1f} GiB a GPU of states" in text
    (kib,) = re.findall(r"about (\d+) KiB a token", text)
    activations = plan.stages[0].workspace.activations
    assert int(kib) == pytest.approx(activations / plan.max_num_batched_tokens / 1024, rel=0.05)


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("demo", max_model_len=2048, memory_bytes=1 << 27) as llm:
        return llm.generate("The people of the", GREEDY)[0].outputs[0].text


@pytest.mark.parametrize("name", CPU)
def test_cpu_deployments_start(name: str, expected: str) -> None:
    with LLM(config=CONFIGS / f"{name}.yaml") as llm:
        assert llm.generate("The people of the", GREEDY)[0].outputs[0].text == expected
        assert llm.plan.device == "cpu"
        assert llm.plan.parallel.num_ranks == (2 if "tp2" in name else 1)
