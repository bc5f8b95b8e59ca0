"""Adapters for benchmarks: random, in the format of peft, kept in the user's cache folder; and what they cost
beside the base model."""

from __future__ import annotations

import json
import os
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runs import OPTIONS, load_engine, run_engine
from workloads import num_scored, w2

from hybridserve import SamplingParams
from hybridserve.config.loader import load_config
from hybridserve.engine.core import EngineCore
from hybridserve.engine.planner import make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.layers.lora import AdaptableModule

NUM_MIXED = 8

TARGETS = {
    "dense": (
        "self_attn.",
        "mamba.",
        "feed_forward.gate_proj",
        "feed_forward.up_proj",
        "feed_forward.down_proj",
    ),
    "experts": ("self_attn.", "mamba.", "feed_forward."),
}
"""What an adapter changes: attention, Mamba and dense MLPs; or experts and routers as well."""


def build_adapters(
    model: Path, modules: Mapping[str, AdaptableModule], targets: str, count: int, rank: int = 16
) -> dict[str, Path]:
    """Name -> directory of `count` adapters for a model that offers `modules`; made on first use."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybridserve" / "benchmarks"
    paths = {f"a{index}": root / f"{model.name}-lora-{targets}-r{rank}-{index}" for index in range(count)}
    for index, path in enumerate(paths.values()):
        if not (path / "adapter_config.json").exists():
            _save(path, modules, targets, rank, index)
    return paths


def _save(path: Path, modules: Mapping[str, AdaptableModule], targets: str, rank: int, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules.items():
        if not any(target in name for target in TARGETS[targets]):
            continue
        key = f"base_model.model.{name}"
        A = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
        tensors[f"{key}.lora_A.weight"] = A
        tensors[f"{key}.lora_B.weight"] = 0.02 * torch.randn(module.out_features, rank, generator=generator)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def adaptable_modules(path: Path) -> Mapping[str, AdaptableModule]:
    core = create_core(path, {"allow_runtime_loading": True, "roots": [path]})
    modules = core.executor.adaptable_modules
    core.close()
    return modules


def create_core(path: Path, lora: dict[str, Any], **options: Any) -> EngineCore:
    config = load_config(path, None, {**OPTIONS, "lora": lora, **options})
    return EngineCore.create(config, make_plan(config, path), path)


def mixed_throughput(
    path: Path, modules: Mapping[str, AdaptableModule], targets: str, repeats: int, **options: Any
) -> dict[str, Any]:
    """Output tokens/s of W2 with every request on one of 8 adapters at random, all on one, and none on any,
    in the same engine, in turn; and the shares that the first two have of the last."""
    adapters = build_adapters(path, modules, targets, NUM_MIXED)
    llm = load_engine(path, lora={"adapters": adapters}, **options)
    names = list(adapters)
    rng = random.Random(0)
    kinds: dict[str, list[str | None]] = {
        "base": [None] * 16,
        "one": [names[0]] * 16,
        "mixed": [rng.choice(names) for _ in range(16)],
    }
    llm.generate([[1] * 32] * NUM_MIXED, SamplingParams(max_tokens=2), adapter=names, progress=False)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(repeats):
        order = list(kinds) if repeat % 2 else list(kinds)[::-1]
        for kind in order:  # in turn, so that all see the same weather
            seconds, _ = run_engine(llm, w2(repeat), kinds[kind])
            rates[kind].append(num_scored("W2", w2(repeat)) / seconds)
    llm.close()
    rate = {kind: statistics.median(values) for kind, values in rates.items()}
    shares = {kind: rate[kind] / rate["base"] for kind in ("one", "mixed")}
    return {"targets": targets, "rates": rates, "shares": shares}
