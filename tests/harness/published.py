"""Checkpoints as they are published: real names, dtypes and shapes, and holes where the numbers would be."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import Any

SHARD_BYTES = 10 * 10**9

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape), as safetensors has them."""


def jamba_tensors(config: Mapping[str, Any]) -> Tensors:
    """What AI21's checkpoints of Jamba hold, written down from their index files and not from our layers."""
    return {name: ("BF16", shape) for name, shape in _jamba(config)}


def _jamba(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    inner, state, rank = 2 * hidden, config["mamba_d_state"], config["mamba_dt_rank"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", (hidden,)
        yield f"{name}.pre_ff_layernorm.weight", (hidden,)
        if layer % 8 == 4:
            for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
                yield f"{name}.self_attn.{part}_proj.weight", (rows, hidden)
        else:
            yield f"{name}.mamba.in_proj.weight", (2 * inner, hidden)
            yield f"{name}.mamba.conv1d.weight", (inner, 1, 4)
            yield f"{name}.mamba.conv1d.bias", (inner,)
            yield f"{name}.mamba.x_proj.weight", (rank + 2 * state, inner)
            yield f"{name}.mamba.dt_proj.weight", (inner, rank)
            yield f"{name}.mamba.dt_proj.bias", (inner,)
            yield f"{name}.mamba.A_log", (inner, state)
            yield f"{name}.mamba.D", (inner,)
            yield f"{name}.mamba.dt_layernorm.weight", (rank,)
            yield f"{name}.mamba.b_layernorm.weight", (state,)
            yield f"{name}.mamba.c_layernorm.weight", (state,)
            yield f"{name}.mamba.out_proj.weight", (hidden, inner)
        blocks = [f"{name}.feed_forward"]
        if layer % 2 == 1:
            yield f"{name}.feed_forward.router.weight", (config["num_experts"], hidden)
            blocks = [f"{name}.feed_forward.experts.{expert}" for expert in range(config["num_experts"])]
        for block in blocks:
            yield f"{block}.gate_proj.weight", (wide, hidden)
            yield f"{block}.up_proj.weight", (wide, hidden)
            yield f"{block}.down_proj.weight", (hidden, wide)
    yield "model.final_layernorm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_outline(path: Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """A directory in Hugging Face format whose shards have real headers, and data that takes no disk."""
    shards: list[Tensors] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = math.prod(shape) * _item(dtype)
        if shards[-1] and size + num_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += num_bytes
    places = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        _write_holes(path / file, shard)
        places |= dict.fromkeys(shard, file)
    total = sum(math.prod(shape) * _item(dtype) for dtype, shape in tensors.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index_file))
    (path / "config.json").write_text(json.dumps(config))


def _write_holes(file: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * _item(dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def _item(dtype: str) -> int:
    return {"I64": 8, "F32": 4, "BF16": 2}[dtype]


def disk_bytes(path: Path) -> int:
    """What the files of a directory take, holes not counted."""
    return sum(512 * file.stat().st_blocks for file in path.iterdir())
