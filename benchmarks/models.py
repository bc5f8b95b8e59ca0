"""Models for benchmarks, built from a seed and kept in the user's cache folder; nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path

SHAPES = {
    "jamba-tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 4,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_dt_rank": 8,
    },
    "jamba-100m": {
        "hidden_size": 512,
        "num_hidden_layers": 16,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "num_experts": 8,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 32,
    },
}
COMMON = {
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(name: str, dtype: str, seed: int = 0) -> Path:
    """The directory of a seeded model in Hugging Face format; made on first use."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybridserve" / "benchmarks"
    path = root / f"{name}-{dtype}-{seed}"
    if not (path / "config.json").exists():
        import torch
        from transformers import JambaConfig, JambaForCausalLM

        torch.manual_seed(seed)
        model = JambaForCausalLM(JambaConfig(**SHAPES[name], **COMMON)).to(getattr(torch, dtype))
        model.save_pretrained(path)
    return path
