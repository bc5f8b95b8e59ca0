"""One pool of ranks and one set of models for all tests over real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.distributed.harness import RankPool
from tests.harness.models import save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = {
    "jamba": ("jamba", EIGHT_HEADS),
    "jamba-dense": (
        "jamba",
        {
            **EIGHT_HEADS,
            "num_experts": 1,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
            "vocab_size": 509,
        },
    ),
    **{
        f"bamba-{groups}": ("bamba", {**EIGHT_HEADS, "mamba_n_groups": groups, "mamba_proj_bias": True})
        for groups in (1, 2, 8)
    },
    "mamba": ("mamba", {"use_bias": True, "vocab_size": 509}),
    "llama": ("llama", {**EIGHT_HEADS, "attention_bias": True, "mlp_bias": True, "vocab_size": 510}),
    "llama-tied": (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 509},
    ),
}


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that any test may use, one test at a time."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a small model, by its name in MODELS."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            family, overrides = MODELS[name]
            made[name] = tmp_path_factory.mktemp(name)
            save_model(family, made[name], 0, **overrides)
        return made[name]

    return find
