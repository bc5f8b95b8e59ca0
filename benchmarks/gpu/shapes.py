"""Sizes of the models that kernels are tried with, as one rank has them. Knows configurations; no tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "hybridserve" / "models" / "shapes"

DEPLOYMENTS = {"jamba-3b": 1, "jamba-mini": 1, "jamba-large": 8}
"""Shapes of `hybridserve.models.shapes`, and the ranks that share them."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of an MLP, and of an expert
    experts: int
    top_k: int
    channels: int  # of Mamba
    states: int
    taps: int  # of its convolution
    dt_rank: int
    vocab: int

    @classmethod
    def load(cls, name: str) -> Shape:
        config, ranks = json.loads((FOLDER / f"{name}.json").read_text()), DEPLOYMENTS[name]
        return cls(
            name=name if ranks == 1 else f"{name} TP{ranks}",
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"] // ranks,
            kv_heads=max(1, config["num_key_value_heads"] // ranks),
            head_dim=config["hidden_size"] // config["num_attention_heads"],
            inner=config["intermediate_size"] // ranks,
            experts=config["num_experts"],
            top_k=config["num_experts_per_tok"],
            channels=config["mamba_expand"] * config["hidden_size"] // ranks,
            states=config["mamba_d_state"],
            taps=config["mamba_d_conv"],
            dt_rank=config["mamba_dt_rank"],
            vocab=config["vocab_size"],
        )


TINY = Shape("tiny", 48, 4, 2, 16, 40, 4, 2, 40, 16, 4, 6, 70)
"""For dry runs."""


def shapes(*, dry: bool) -> list[Shape]:
    return [TINY] if dry else [Shape.load(name) for name in DEPLOYMENTS]
