"""Adapters for benchmarks: random, in the format of peft, kept in the user's cache folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.layers.lora import AdaptableModule

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
