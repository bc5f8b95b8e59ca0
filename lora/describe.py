"""What an adapter's directory holds, and what of it a model would apply, in words.

Knows the two files and the report of a load; decides nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from hybridserve.lora.adapter import WEIGHTS_FILE
from hybridserve.lora.peft_config import PeftConfig
from hybridserve.lora.tensor_file import TensorFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hybridserve.lora.report import LoadReport

Row = tuple[str, str]


def layout(path: Path) -> Iterator[Row]:
    """The config, and the tensors with the layers and experts that are alike in one row. ValueError for files
    that can't be read."""
    config = PeftConfig.load(path)
    kinds = [
        *(["rsLoRA"] if config.use_rslora else ["LoRA"]),
        *(["DoRA"] if config.use_dora else []),
        *(["with biases"] if config.lora_bias else []),
    ]
    yield "adapter", str(path)
    yield (
        "config",
        f"{', '.join(kinds)}, r {config.r}, alpha {config.lora_alpha:g}, peft {config.peft_version}",
    )
    for name in ("rank_pattern", "alpha_pattern"):
        if pattern := getattr(config, name):
            yield name, ", ".join(f"{key}: {value:g}" for key, value in pattern.items())
    if config.alora_invocation_tokens:
        tokens = " ".join(map(str, config.alora_invocation_tokens))
        yield "aLoRA", f"on from the last {tokens} of a prompt"
    with TensorFile(path / WEIGHTS_FILE) as file:
        entries = file.entries
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    yield "tensors", f"{len(entries)}, {num_bytes:,} bytes"
    alike = Counter(
        (_without_numbers(key), f"{list(entry.shape)} {entry.dtype}") for key, entry in entries.items()
    )
    for (key, shape), count in sorted(alike.items()):
        yield "", f"{count:>4} x {key} {shape}"


def report(report: LoadReport) -> Iterator[Row]:
    """What a load has applied, by kind of module, and what needed no applying."""
    applied = report.applied
    yield "applied", f"{len(applied)} modules, {report.num_bytes:,} bytes"
    for module, (count, num_bytes) in _by_kind(applied.items()).items():
        yield "", f"{count:>4} x {module}: {num_bytes:,} bytes"
    for key, reason in report.unused.items():
        yield "unused", f"{key}: {reason}"


def _by_kind(applied: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    kinds: dict[str, tuple[int, int]] = {}
    for module, num_bytes in applied:
        count, total = kinds.get(_without_numbers(module), (0, 0))
        kinds[_without_numbers(module)] = (count + 1, total + num_bytes)
    return kinds


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
