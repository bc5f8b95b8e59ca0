"""How many collectives a step takes and how large they are: docs/parallelism.md's formula, counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hybridserve.models
from hybridserve.distributed.pipeline import PipelineStage
from hybridserve.distributed.tp import TPGroup
from hybridserve.models.registry import build_model
from tests.distributed import work
from tests.harness.models import Backends, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.distributed.harness import RankPool

IDS = random_ids(0, 24, vocab_size=500)
FLOAT32 = 4


def reductions(layers: range, config: dict[str, Any], tensor: int, *, is_first: bool) -> list[int]:
    """The widths, in elements a token, of all that one stage sums over its ranks: the formula."""
    hidden = config["hidden_size"]
    widths = [hidden] if is_first else []
    period, offset = config.get("attn_layer_period", 1), config.get("attn_layer_offset", 0)
    dt_rank, state = (config.get(f"mamba_{name}", config.get(name, 0)) for name in ("dt_rank", "d_state"))
    if config["model_type"] == "mamba":
        dt_rank, state, period, offset = config["time_step_rank"], config["state_size"], 1, 1
    for layer in layers:
        if config["model_type"] == "bamba":
            groups = config["mamba_n_groups"]
            if layer not in config["attn_layer_indices"] and groups < tensor:  # the norm's sums of squares
                widths.append(groups)
        elif layer % period != offset:  # x_proj of Mamba
            widths.append(dt_rank + 2 * state)
        widths.append(hidden)  # the mixer's output
        if config["model_type"] != "mamba":
            widths.append(hidden)  # the feed-forward block's, whether dense or experts
    return widths


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("topology", [(2, 1), (1, 2), (2, 2)], ids=lambda t: f"tp{t[0]}-pp{t[1]}")
@pytest.mark.parametrize("name", ["jamba", "jamba-dense", "bamba-1", "bamba-2", "mamba", "llama"])
def test_counted_on_real_groups(
    ranks: RankPool,
    model: Callable[[str], Path],
    name: str,
    topology: tuple[int, int],
    expert_parallel: bool,
) -> None:
    config = json.loads((model(name) / "config.json").read_text())
    tensor, num_stages = topology
    counted = ranks.run(
        tensor, num_stages, work.count_collectives, model(name), IDS, expert_parallel=expert_parallel
    )
    for index, counts in enumerate(counted):
        stage = PipelineStage(index // tensor, num_stages)
        widths = reductions(
            stage.layers(config["num_hidden_layers"]), config, tensor, is_first=stage.is_first
        )
        gathered = -(-config["vocab_size"] // tensor) if stage.is_last else 0
        sends = 0 if stage.is_last else 1
        assert counts == {
            "reductions": len(widths) * (tensor > 1),
            "gathers": int(stage.is_last and tensor > 1),
            "others": 0,
            "bytes": len(IDS) * (sum(widths) + gathered) * FLOAT32 * (tensor > 1),
            "sends": sends,
            "sent_bytes": sends * len(IDS) * config["hidden_size"] * FLOAT32,
        }


def test_jamba_large_reduces_208_times() -> None:
    """And gathers once; with two stages, one of the reductions fewer on the second, and a transfer."""
    path = Path(hybridserve.models.__path__[0]) / "shapes" / "jamba-large.json"
    config = json.loads(path.read_text())
    config["mamba_dt_rank"] = 512
    for num_stages in (1, 2):
        counts = []
        for index in range(num_stages):
            stage = PipelineStage(index, num_stages)
            context = Backends().context(tp=TPGroup(0, 8), pipeline=stage, device="meta")
            build_model(config, context)
            widths = reductions(stage.layers(72), config, 8, is_first=stage.is_first)
            assert sorted(context.footprint.reductions) == sorted(widths)
            counts.append(len(widths))
        assert sum(counts) == 72 * 2 + 63 + 1
    assert counts == [36 * 2 + 32 + 1, 36 * 2 + 31]
