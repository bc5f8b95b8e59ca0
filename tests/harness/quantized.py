"""Quantized models loaded without an engine, and what to compare of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from hybridserve.kernels.lora.reference import Reference as ReferenceLora
from hybridserve.layers.lora import LoraRegistry
from hybridserve.models.weights import load_model
from hybridserve.quant.compressed_tensors import read_config
from hybridserve.quant.policy import Quantization
from tests.harness.models import Backends, Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hybridserve.layers.context import BuildContext

SCALED = ("int8", "int8-w8a8", "fp8")
"""Formats that need no other package."""
FORMATS = (*SCALED, "bnb-int8", "bnb-nf4")


class QuantizedModel:
    """A checkpoint loaded with a quantization; without one, as the checkpoint is."""

    def __init__(
        self,
        path: Path,
        quantization: Quantization | None = None,
        backends: Backends | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        backends = backends or Backends()
        if quantization is None:
            quantization = read_config(json.loads((path / "config.json").read_text()))
        registry = LoraRegistry(ReferenceLora(), 1)
        self.context: BuildContext = backends.context(dtype, lora=registry, quantization=quantization)
        self.model = load_model(path, self.context)
        self.runner = Runner(self.model, backends, poison=0.0)
        self.bases: Mapping[str, Callable[[], torch.Tensor]] = {
            name: module.base for name, module in registry.modules.items()
        }

    @property
    def formats(self) -> dict[str, str]:
        return {name: chosen.name for name, chosen in self.context.formats.formats.items()}


def everything(format_name: str) -> Quantization:
    return Quantization(format_name, ("all",))


def dequantized_copy(model: QuantizedModel, source: Path, destination: Path) -> Path:
    """A plain float32 checkpoint that holds the numbers which a quantized model multiplies by."""
    destination.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        quantized = model.formats.get(module, "none") != "none"
        tensors[name] = (model.bases[module]() if quantized else tensor).float().contiguous()
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (destination / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return destination


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def edit_config(path: Path, **fields: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
