"""The seeded model of the end-to-end measurements: a directory in Hugging Face format, and adapters for it.

Made on the device that measures, where three thousand million random numbers take a moment; nothing is
downloaded.
"""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.shapes import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

NAME = "jamba-3b"

NUM_ADAPTERS = 8

RANK = 16

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "mamba_dt_rank": 4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
"""What a dry run's model has otherwise than `NAME`."""

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config(*, dry: bool) -> dict[str, Any]:
    """Its config.json."""
    shape: dict[str, Any] = json.loads((FOLDER / f"{NAME}.json").read_text())
    return shape | TOKENS | (TINY if dry else {})


def build(work: Path, *, dry: bool, seed: int = 0) -> Path:
    """Its directory below `work`, in bfloat16; made on first use."""
    path = work / NAME
    if (path / "config.json").exists():
        return path
    from transformers import JambaConfig, JambaForCausalLM

    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cpu" if dry else "cuda"):
            model = JambaForCausalLM(JambaConfig(**config(dry=dry)))
    finally:
        torch.set_default_dtype(before)
    unfinished = path.with_suffix(".unfinished")
    model.save_pretrained(unfinished)
    unfinished.rename(path)
    del model
    gc.collect()
    torch.cuda.empty_cache()  # whoever asks for its memory next asks the driver
    return path


def build_adapters(work: Path, path: Path, seed: int = 0) -> dict[str, str]:
    """Name -> directory, in peft's format, of adapters of all projections of the model in `path`; made on
    first use."""
    from safetensors.torch import save_file

    paths = {f"a{index}": work / f"adapter-{index}" for index in range(NUM_ADAPTERS)}
    sizes = projections(path)
    generator = torch.Generator().manual_seed(seed)
    for adapter in paths.values():
        if (adapter / "adapter_config.json").exists():
            continue
        tensors = {}
        for name, (num_outputs, num_inputs) in sizes.items():
            A = torch.randn(RANK, num_inputs, generator=generator) / num_inputs**0.5
            B = 0.02 * torch.randn(num_outputs, RANK, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = A.bfloat16()
            tensors[f"base_model.model.{name}.lora_B.weight"] = B.bfloat16()
        adapter.mkdir(parents=True, exist_ok=True)
        save_file(tensors, adapter / "adapter_model.safetensors")
        facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "task_type": "CAUSAL_LM"}
        (adapter / "adapter_config.json").write_text(json.dumps(facts))
    return {name: str(adapter) for name, adapter in paths.items()}


def projections(path: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear projection of a model, by its name, from its files."""
    from safetensors import safe_open

    sizes = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith("_proj.weight"):
                    num_outputs, num_inputs = tensors.get_slice(name).get_shape()
                    sizes[name.removesuffix(".weight")] = (num_outputs, num_inputs)
    return sizes
