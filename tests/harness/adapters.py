"""Small random adapters made by peft itself, and the models that they should make: base and adapter merged.

The oracle is `merge_and_unload`, not peft's forward pass: transformers 5 reads some weights (dt_proj) past
the module that peft wrapped, and then silently leaves the adapter out.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.distributed.tp import TPGroup
from hybridserve.kernels import attention, gemm, lora, moe, pointwise, ssm
from hybridserve.kernels.lora.reference import Reference as ReferenceLora
from hybridserve.kernels.registry import Capabilities
from hybridserve.layers.lora import LoraRegistry
from hybridserve.lora.adapter import read_adapter
from hybridserve.lora.layers import place_adapter, remove
from tests.harness.models import Backends, load_runner, save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hybridserve.kernels.lora.interface import LoraBackend
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.adapter import Adapter
    from hybridserve.lora.layers import PlacedAdapter

    Tensors = dict[str, torch.Tensor]

TINY = {
    "jamba": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_d_state": 8,
    },
    "mamba": {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "time_step_rank": 4},
    "llama": {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
}
"""Family -> what makes its model of `harness.models` smaller still. Of Jamba, layer 2 is attention and the
others are Mamba; layers 1 and 3 have experts."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MAMBA = ("in_proj", "x_proj", "dt_proj", "out_proj")
DENSE = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ROUTER = ("router.weight",)


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter changes. `parameters` are tensors that no Linear module holds (transformers 5)."""

    seed: int
    r: int
    modules: Sequence[str] = ()
    parameters: Sequence[str] = ()
    alpha: float = 8
    config: dict[str, Any] = field(default_factory=dict)
    """Further fields of peft's LoraConfig."""


ADAPTERS = {
    "A": AdapterSpec(1, 4, (*ATTENTION, *MAMBA, *DENSE, *ENDS), (*EXPERTS, *ROUTER)),
    "B": AdapterSpec(2, 2, ("q_proj",), alpha=16),
    "C": AdapterSpec(3, 8, ("in_proj", "x_proj", "out_proj", "o_proj"), EXPERTS),
    "D": AdapterSpec(4, 3, ATTENTION, config={"use_rslora": True}),
    "E": AdapterSpec(5, 5, (), EXPERTS),
    "F": AdapterSpec(6, 17, (*MAMBA, *DENSE)),
    "dora": AdapterSpec(7, 4, (*ATTENTION, *MAMBA, *DENSE, *ENDS), config={"use_dora": True}),
    "alora": AdapterSpec(
        8, 4, (*ATTENTION, "in_proj", "x_proj", "out_proj"), config={"alora_invocation_tokens": [7, 8, 9]}
    ),
}
"""Adapters of the tiny Jamba. Different ranks and targets; A changes every kind of module, B a single one."""


def save_adapter(base: Path, path: Path, spec: AdapterSpec, *, dtype: torch.dtype | None = None) -> Path:
    """Let peft make the adapter for the model in `base`, and save it. B is never zero, or every fault would
    hide."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            r=spec.r,
            lora_alpha=spec.alpha,
            target_modules=list(spec.modules),
            target_parameters=list(spec.parameters) or None,
            task_type="CAUSAL_LM",
            **spec.config,
        )
        model = peft.get_peft_model(_load(base), config)
        randomize_adapter(model, spec.seed)
        if dtype is not None:
            model = model.to(dtype)
        model.save_pretrained(path)
    return path


@torch.no_grad()
def randomize_adapter(model: torch.nn.Module, seed: int) -> None:
    """Give every tensor of a peft model's adapter a value that matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" not in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.mul_(1 + 0.2 * noise.clamp(-2, 2))
        elif "embedding_A" in name:
            parameter.copy_(0.3 * noise)
        elif "lora_A" in name:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(0.3 * noise)


def merged(base: Path, adapter: Path) -> torch.nn.Module:
    """transformers' model with the adapter merged into its weights.

    An adapter on one of two tied embeddings changes that one only, as it does in peft's forward pass: merged
    in place it would change both.
    """
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _load(base)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
            model.config.tie_word_embeddings = False
        return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().eval()


@torch.no_grad()
def activated_logits(base: Path, adapter: Path, ids: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of peft's own forward pass, for what can't be merged: aLoRA, tied adapters."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(_load(base), adapter).eval()
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def edit_config(path: Path, **fields: Any) -> None:
    """Change fields of an adapter's config; `...` removes one."""
    file = path / "adapter_config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(path: Path, change: Callable[[Tensors], Tensors | None]) -> None:
    """Let `change(tensors)` alter an adapter's tensors, or return others to put in their place."""
    from safetensors.torch import load_file, save_file

    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors = change(tensors) or tensors
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file)


def save_zero_row(base: Path, path: Path, module: str, row: int = 0) -> Path:
    """A DoRA adapter that takes one row of a module's weight to zero, which has no direction any more."""
    from safetensors.torch import load_file, save_file

    weight = load_file(base / "model.safetensors")[f"{module}.weight"].float()
    A, B = -weight[row : row + 1], torch.zeros(len(weight), 1)
    B[row] = 1
    key = f"base_model.model.{module}.lora_"
    path.mkdir()
    tensors = {"A.weight": A, "B.weight": B, "magnitude_vector": torch.ones(len(weight))}
    save_file({key + name: tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": True}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def refused(runner: AdaptedRunner, path: Path, *words: str, max_rank: int = 64) -> None:
    """Reading the adapter fails, and the message says where and why, in one line that is not long."""
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        runner.read(path, max_rank)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert len(message) < 2000
    assert "\n" not in message


class Kit:
    """A tiny model, its adapters, made when first asked for, and their oracles."""

    def __init__(self, root: Path, family: str = "jamba", seed: int = 0, **overrides: Any) -> None:
        self.root = root
        self.base = root / "base"
        self.vocab_size = {**TINY[family], **overrides}["vocab_size"]
        self.model = save_model(family, self.base, seed, **{**TINY[family], **overrides})
        self._oracles: dict[Path, torch.nn.Module] = {}

    def adapter(self, name: str, spec: AdapterSpec | None = None) -> Path:
        """The directory of an adapter: of `ADAPTERS`, or as `spec` says. Not to be changed; see `copy`."""
        path = self.root / name
        return path if path.exists() else save_adapter(self.base, path, spec or ADAPTERS[name])

    def copy(self, name: str, path: Path) -> Path:
        """An adapter's files in another directory, free to be spoiled."""
        shutil.copytree(self.adapter(name), path)
        return path

    @torch.no_grad()
    def logits(self, name: str | Path | None, ids: Sequence[int]) -> torch.Tensor:
        """What the base (None), or the base with an adapter, says at every position: [tokens, vocab]."""
        if name is None:
            model = self.model
        else:
            path = self.root / name
            model = self._oracles.get(path) or self._oracles.setdefault(path, merged(self.base, path))
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0]


class AdaptedRunner:
    """This project's model with adapter slots, run without an engine."""

    def __init__(
        self,
        base: Path,
        backends: Backends | None = None,
        *,
        lora: LoraBackend | None = None,
        num_slots: int = 4,
        dtype: torch.dtype = torch.float32,
        tp: TPGroup | None = None,
        modules: Mapping[str, AdaptableModule] | None = None,
        **options: Any,
    ) -> None:
        """`modules`: of all ranks together, where this one has not all of them; `options` as for
        `Backends.context`."""
        self.dtype = dtype
        self.tp = tp or TPGroup.single()
        self.registry = LoraRegistry(lora or ReferenceLora(), num_slots)
        self.runner = load_runner(base, backends, dtype=dtype, tp=self.tp, lora=self.registry, **options)
        self.modules = self.registry.modules
        self.all_modules = modules or self.modules

    def read(self, path: Path, max_rank: int = 64) -> Adapter:
        return read_adapter(path, self.all_modules, max_rank=max_rank, dtype=self.dtype)

    def place(self, path: Path) -> PlacedAdapter:
        return place_adapter(self.read(path), self.modules, self.dtype, torch.device("cpu"), self.tp)

    def install(self, slot: int, path: Path) -> PlacedAdapter:
        """Empties the slot first."""
        remove(slot, self.registry.tables)
        placed = self.place(path)
        placed.install(slot)
        return placed

    def logits(
        self, ids: Sequence[int], slot: int = 0, *, start: int = 0, chunk: int | None = None
    ) -> torch.Tensor:
        """At every position [tokens, vocab], of a new sequence that uses the adapter in `slot`."""
        sequence = self.runner.sequences[0]
        sequence.num_computed = 0
        sequence.adapter_slot, sequence.adapter_start = slot, start
        return self.runner.run(ids, chunk)


def backends_named(name: str, dtype: str = "float32") -> tuple[Backends, LoraBackend]:
    """The backends of this name, of every operator that has one. Skips the test where they can't run."""
    found = {}
    for operator in (attention, ssm, gemm, moe, pointwise, lora):
        backend = next((backend for backend in operator.BACKENDS if backend.name == name), None)
        if backend is not None:
            if (reason := backend.why_not(Capabilities("cpu", dtype))) is not None:
                pytest.skip(f"{backend.__module__}: {reason}")
            found[operator.__name__.rpartition(".")[2]] = backend()
    kernel = found.pop("lora")
    return Backends(**found), kernel


def _load(base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
