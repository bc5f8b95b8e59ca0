"""Quantizes a checkpoint: one directory in Hugging Face format into another, in the compressed-tensors
layout.

Reads, quantizes and writes one tensor at a time, with the same formats that quantize while loading. Knows
files and names; computes nothing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridserve.engine.new_directory import check_new, new_directory
from hybridserve.engine.planner import bare_context
from hybridserve.engine.quantization_plan import plan_quantization
from hybridserve.models.config import checkpoint_dtype, load_hf_config
from hybridserve.models.registry import build_model
from hybridserve.models.safetensors_file import Entry, SafetensorsWriter
from hybridserve.models.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from hybridserve.quant import compressed_tensors
from hybridserve.quant.format import Shard, WeightError
from hybridserve.quant.policy import Quantization

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hybridserve.engine.quantization_plan import QuantizationPlan
    from hybridserve.layers.weights import ModelWeights
    from hybridserve.models.weights import StoredTensor
    from hybridserve.quant.policy import FormatPolicy

CODE_NAMES = {"int8": "I8", "int8-w8a8": "I8", "fp8": "F8_E4M3"}
"""Format -> dtype of its codes, as safetensors spells it."""

REPORT_FILE = "quantization.json"
COPIED = ("*.json", "*.model", "*.jinja", "*.txt", "*.md", "LICENSE*")
"""What goes along: tokenizer, chat template, model card. Never code, never pickles."""

_WHOLE = Shard((slice(None), slice(None)), (slice(None), slice(None)))


@dataclass(frozen=True, slots=True)
class Report:
    """What was quantized and what was not, by names of modules; sizes are those of the weights in bytes."""

    plan: QuantizationPlan
    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.plan.quantization.format,
            "targets": list(self.plan.quantization.targets),
            "share_of_parameters": round(self.plan.share, 4),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "quantized": list(self.quantized),
            "kept": list(self.kept),
        }


def quantize_checkpoint(model: Path, out: Path, format_name: str, targets: tuple[str, ...] | None) -> Report:
    """Write `model`, quantized, into the new or empty directory `out`; all of it or nothing.

    Raises ValueError for what can't be quantized, ValueError or OSError for what can't be written; what
    exists in `out` is never touched.
    """
    if format_name not in compressed_tensors.WRITTEN:
        names = ", ".join(compressed_tensors.WRITTEN)
        raise ValueError(f"--format: {format_name!r} can't be written to a checkpoint (can: {names})")
    check_new(out)
    config = load_hf_config(model)
    if compressed_tensors.read_config(config) is not None:
        raise ValueError(f"{model}: is quantized already")
    context = bare_context(checkpoint_dtype(config), Quantization(format_name, targets or ("all",)))
    build_model(config, context)
    plan = plan_quantization([context])
    if plan is None:
        raise ValueError(f"{model}: has nothing that {', '.join(targets or ('all',))} means")
    writer = _Writer(Checkpoint(model, context.weights), context.weights, context.formats)
    with new_directory(out, last="config.json") as folder:
        bytes_before, bytes_after = writer.write(folder)
        quantized, kept = writer.modules()
        report = Report(plan, quantized, kept, bytes_before, bytes_after)
        _copy_small_files(model, folder)
        quantization = compressed_tensors.write_config(format_name, writer.ignored())
        _write_json(folder / "config.json", {**config, "quantization_config": quantization})
        _write_json(folder / REPORT_FILE, report.to_dict())
    return report


class _Writer:
    """Files of the new checkpoint, one for each of the old one's, under the same names."""

    def __init__(self, checkpoint: Checkpoint, weights: ModelWeights, formats: FormatPolicy) -> None:
        self._checkpoint = checkpoint
        self._weights = weights
        self._formats = formats
        for each in formats.formats.values():
            each.keeps_weights = False

    def modules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of what is quantized and of all other modules."""
        quantized = [name for name in self._formats.formats if self._is_quantized(name)]
        own = {name for name, tensor in self._weights.tensors.items() if tensor.covers == (name,)}
        kept = {name.removesuffix(".weight") for name in own} - set(quantized)
        return tuple(sorted(quantized)), tuple(sorted(kept))

    def ignored(self) -> list[str]:
        """Projections that are not quantized; a tied output head is one for other readers."""
        kept = {name for name in self._formats.formats if not self._is_quantized(name)}
        return sorted(kept | ({"lm_head"} if "lm_head" not in self._formats.formats else set()))

    def write(self, folder: Path) -> tuple[int, int]:
        """Bytes of the weights before and after."""
        places: dict[str, str] = {}
        before = after = 0
        for file in self._checkpoint.files:
            tensors = [stored for stored in self._checkpoint.tensors if stored.file is file]
            entries = {name: entry for stored in tensors for name, entry in self._entries(stored)}
            with SafetensorsWriter(folder / file.path.name, entries) as out:
                for stored in tensors:
                    self._write_tensor(out, stored)
            places |= dict.fromkeys(entries, file.path.name)
            before += sum(entry.num_bytes for entry in file.entries.values())
            after += sum(entry.num_bytes for entry in entries.values())
        if self._checkpoint.files[0].path.name != SINGLE_FILE:
            index = {"metadata": {"total_size": after}, "weight_map": dict(sorted(places.items()))}
            _write_json(folder / INDEX_FILE, index)
        return before, after

    def _entries(self, stored: StoredTensor) -> Iterator[tuple[str, Entry]]:
        """The tensors that become of one."""
        modules = self._quantized_modules(stored)
        if not modules:
            yield stored.name, stored.file.entries[stored.name]
        for module in modules:
            shape = self._weights.tensors[f"{module}.weight"].shape
            yield (
                f"{module}.{compressed_tensors.CODES}",
                Entry(CODE_NAMES[self._formats.quantization.format], shape),
            )
            yield f"{module}.{compressed_tensors.SCALE}", Entry("F32", (shape[0], 1))

    def _write_tensor(self, out: SafetensorsWriter, stored: StoredTensor) -> None:
        tensor = stored.file.read(stored.stored_name)
        modules = self._quantized_modules(stored)
        if not modules:
            out.write(stored.name, tensor)
        for index, module in enumerate(modules):
            part = tensor
            if len(modules) > 1:  # stacked, as `CheckpointTensor.covers` says
                num_experts = len(tensor)
                which, expert = divmod(index, num_experts)
                part = tensor[expert].chunk(len(modules) // num_experts)[which]
            chosen = self._formats.formats[module]
            num_rows, num_inputs = part.shape
            weights = chosen.create_linear(num_rows, num_inputs, part.dtype, part.device)
            try:
                chosen.load_linear(weights, part, _WHOLE)
            except WeightError as error:
                raise ValueError(f"{stored.file.path}: the tensor {stored.name!r} {error}") from None
            out.write(f"{module}.{compressed_tensors.CODES}", weights["codes"])
            out.write(f"{module}.{compressed_tensors.SCALE}", weights["scales"].unsqueeze(1))

    def _quantized_modules(self, stored: StoredTensor) -> list[str]:
        """Those that a tensor holds. Experts are quantized together: of a stacked tensor all are, or none."""
        covers = self._weights.tensors[stored.name].covers
        modules = [name.removesuffix(".weight") for name in covers]
        return [module for module in modules if self._is_quantized(module)]

    def _is_quantized(self, module: str) -> bool:
        return self._formats.formats.get(module, self._formats.plain) is not self._formats.plain


def _copy_small_files(source: Path, destination: Path) -> None:
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in ("config.json", INDEX_FILE, REPORT_FILE):
                shutil.copyfile(file, destination / file.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
