"""Makes tests/data/transformers4: adapters with the tensor names of transformers 4, and the logits with them.

In transformers 4 every expert of a Jamba has Linear modules of its own, and so has the router; adapters from
then can't be made, and not even loaded, with transformers 5. So this runs in an environment of its own:

    python -m venv /tmp/old && /tmp/old/bin/pip install torch transformers==4.57.6 peft==0.17.1
    /tmp/old/bin/python tools/make_transformers4_adapter.py tests/data/transformers4

The base model is not saved: `base_tensor` makes it again, tensor by tensor, from names, which are the same in
the checkpoints of both generations.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIG = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Layers 0 and 2 are Mamba with a dense feed-forward block, layer 1 is attention with experts."""
IDS = [5, 17, 3, 29, 11, 5, 8, 30, 21, 4, 17, 9]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "some-experts": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*\.experts\.(0|2)\.(gate|up|down)_proj",
        "use_rslora": True,
        "rank_pattern": {r"experts\.2\..*": 3},
        "alpha_pattern": {"down_proj": 3},
    },
    "dora": {"r": 2, "lora_alpha": 4, "target_modules": r".*(router|experts\.1\..*_proj)", "use_dora": True},
}


def base_tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """The base model's tensor of that name, float32. numpy promises that this generator never changes."""
    random = np.random.RandomState(zlib.crc32(name.encode()))
    noise = random.standard_normal(tuple(shape)).astype(np.float32)
    if name.endswith("A_log"):
        return 0.1 * noise - 0.3
    if name.endswith("dt_proj.bias"):
        return 0.3 * noise - 3
    if "norm" in name or name.endswith(".D"):
        return 1 + 0.2 * noise
    if "embed" in name or name.endswith("bias"):
        return 0.3 * noise
    return noise / np.float32(shape[-1] ** 0.5)


def main(out: Path) -> None:
    import peft
    import torch
    import transformers
    from safetensors.torch import save_file

    if not transformers.__version__.startswith("4."):
        raise SystemExit(f"transformers {transformers.__version__}: this needs 4.57.6")
    config = transformers.JambaConfig(**CONFIG, use_mamba_kernels=False)
    logits = {}
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        model = transformers.JambaForCausalLM(config).float().eval()
        state = {key: torch.from_numpy(base_tensor(key, t.shape)) for key, t in model.state_dict().items()}
        model.load_state_dict(state)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in wrapped.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in key:
                    parameter.mul_(1 + 0.2 * noise.clamp(-2, 2))
                elif "lora_B" in key:
                    parameter.copy_(0.3 * noise)
                elif "lora_A" in key:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            wrapped.save_pretrained(out / name)
            (out / name / "README.md").unlink(missing_ok=True)
            merged = wrapped.merge_and_unload()
            logits[name] = merged(torch.tensor([IDS]), use_cache=False).logits[0].contiguous()
    save_file(logits, out / "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
