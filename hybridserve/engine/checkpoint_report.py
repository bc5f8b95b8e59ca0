"""What a checkpoint holds and where a model puts it, held against its config.json without reading a number.

Knows files and names; plans no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridserve.engine.planner import bare_context
from hybridserve.engine.units import size_text
from hybridserve.models.config import checkpoint_dtype, load_hf_config
from hybridserve.models.mapping import mapping
from hybridserve.models.registry import build_model
from hybridserve.models.weights import check_weights
from hybridserve.quant.compressed_tensors import read_config, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.config.schema import EngineConfig


def checkpoint_rows(config: EngineConfig, path: Path) -> list[tuple[str, str]]:
    """Rows of a table: the files, then all tensors, those whose names differ in numbers alone together.

    Raises ValueError, naming the tensor, for one that is missing, belongs nowhere or has another shape than
    config.json makes it.
    """
    hf_config = load_hf_config(path)
    dtype = checkpoint_dtype(hf_config) if config.dtype == "auto" else config.dtype
    quantization = resolve(config.quantization.format, config.quantization.targets, read_config(hf_config))
    context = bare_context(dtype, quantization)
    checkpoint = check_weights(build_model(hf_config, context), path)
    entries = [entry for file in checkpoint.files for entry in file.entries.values()]
    files = f"{len(checkpoint.files)} files" if len(checkpoint.files) > 1 else checkpoint.files[0].path.name
    size = size_text(sum(entry.num_bytes for entry in entries))
    rows = [("checkpoint", f"{files}, {len(entries):,} tensors, {size}; each has its place")]
    return [*rows, *mapping(checkpoint, context.formats)]
