"""Derives everything that a configuration leaves open, and says what it costs (D11). Reads no weights.

Knows shapes, bytes and backends; knows no request.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch

from hybridserve.core.cache_spec import MIN_SLABS, CacheLayout
from hybridserve.distributed.tp import TPGroup
from hybridserve.engine.adapter_plan import LoraPlan, initial_adapters, plan_lora
from hybridserve.engine.quantization_plan import QuantizationPlan, plan_quantization
from hybridserve.engine.units import UNITS, count_text, size_text
from hybridserve.kernels import native
from hybridserve.kernels.registry import AUTO, EXACT, Capabilities, select
from hybridserve.layers.context import BuildContext
from hybridserve.layers.lora import LoraRegistry
from hybridserve.models.config import checkpoint_dtype, load_hf_config
from hybridserve.models.registry import build_model
from hybridserve.quant.compressed_tensors import read_config, resolve
from hybridserve.quant.policy import Quantization
from hybridserve.quant.registry import make_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hybridserve.config.schema import EngineConfig
    from hybridserve.kernels.attention.interface import AttentionBackend
    from hybridserve.kernels.gemm.interface import GemmBackend
    from hybridserve.kernels.lora.interface import LoraBackend
    from hybridserve.kernels.moe.interface import MoEBackend
    from hybridserve.kernels.pointwise.interface import PointwiseBackend
    from hybridserve.kernels.ssm.interface import SSMBackend

OPERATORS = ("attention", "ssm", "gemm", "moe", "pointwise", "lora")
"""The last one has a backend only where adapters may be loaded."""

UNLIMITED_MODEL_LEN = 1 << 20
"""`max_model_len` of a model that sets no limit of its own (pure state models)."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What runs an operator, and each candidate's reason for not being it."""

    name: str
    rejected: tuple[tuple[str, str], ...]
    obstacles: tuple[tuple[str, str], ...]
    """Those of them that could not have been taken."""

    def text(self, *, every_reason: bool) -> str:
        reasons = self.rejected if every_reason else self.obstacles
        why = "; ".join(f"not {name}: {reason}" for name, reason in reasons)
        return f"{self.name} ({why})" if why else self.name

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "rejected": self.rejected}


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """All that is derived from a configuration and a checkpoint's config.json."""

    model: str
    architecture: str
    device: str
    dtype: str
    cache_dtype: str
    state_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    layout: CacheLayout
    backends: Mapping[str, BackendChoice]
    parameters_total: int
    parameters_active: int
    """Parameters read a token; the input embedding, of which one row is read, is left out."""
    weight_bytes: int
    quantization: QuantizationPlan | None
    """None: nothing is quantized."""
    lora: LoraPlan | None
    """None: the model is built without a place for adapters."""

    @property
    def arena_bytes(self) -> int:
        return self.layout.num_slabs * self.layout.slab_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layout.bytes_per_block // self.layout.block_size

    def capacity(self) -> list[tuple[int, int]]:
        """(tokens a sequence, sequences that fit together) at powers of four up to `max_model_len`."""
        lengths = [256 * 4**power for power in range(8) if 256 * 4**power < self.max_model_len]
        return [(length, self.layout.max_sequences(length)) for length in [*lengths, self.max_model_len]]

    def to_dict(self) -> dict[str, Any]:
        """For `hybridserve plan --json`."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "device": self.device,
            "dtype": self.dtype,
            "cache_dtype": self.cache_dtype,
            "state_dtype": self.state_dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "parameters_total": self.parameters_total,
            "parameters_active": self.parameters_active,
            "weight_bytes_per_gpu": self.weight_bytes,
            "quantization": None if self.quantization is None else self.quantization.to_dict(),
            "kv_bytes_per_token_per_gpu": self.kv_bytes_per_token,
            "state_bytes_per_sequence_per_gpu": self.layout.bytes_per_slot,
            "arena_bytes_per_gpu": self.arena_bytes,
            "block_size": self.layout.block_size,
            "bytes_per_block": self.layout.bytes_per_block,
            "num_slabs": self.layout.num_slabs,
            "slab_bytes": self.layout.slab_bytes,
            "blocks_per_slab": self.layout.blocks_per_slab,
            "slots_per_slab": self.layout.slots_per_slab,
            "capacity": [{"tokens": tokens, "sequences": count} for tokens, count in self.capacity()],
            "lora": None if self.lora is None else self.lora.to_dict(),
            "backends": {op: choice.to_dict() for op, choice in self.backends.items()},
        }

    def table(self, *, every_reason: bool = False) -> str:
        """The plan as the few lines that an engine prints when it starts. Of the backends that were not taken
        it tells those that could not be, or every one with its reason."""
        layout = self.layout
        per_slab = []
        if layout.blocks_per_slab:
            per_slab.append(f"{layout.blocks_per_slab} blocks")
        if layout.slots_per_slab:
            per_slab.append(f"{layout.slots_per_slab} slots")
        rows = [
            ("model", f"{self.model} ({self.architecture}), {self.dtype} on {self.device}"),
            (
                "weights",
                f"{size_text(self.weight_bytes)}, {count_text(self.parameters_total)} parameters, "
                f"{count_text(self.parameters_active)} read a token",
            ),
            *(self.quantization.rows() if self.quantization is not None else ()),
            (
                "arena",
                f"{size_text(self.arena_bytes)}: {layout.num_slabs} slabs of {size_text(layout.slab_bytes)}, "
                f"each {' or '.join(per_slab)}",
            ),
        ]
        if layout.blocks_per_slab:
            rows.append(
                (
                    "block",
                    f"{layout.block_size} tokens, {size_text(layout.bytes_per_block)} "
                    f"({size_text(self.kv_bytes_per_token)} a token), {self.cache_dtype}",
                )
            )
        if layout.slots_per_slab:
            rows.append(
                ("slot", f"{size_text(layout.bytes_per_slot)} a sequence, recurrent state {self.state_dtype}")
            )
        fits = ", ".join(f"{count:,} x {tokens:,}" for tokens, count in self.capacity())
        rows.append(("fits", f"{fits} tokens"))
        rows.append(
            ("limits", f"{self.max_num_seqs} sequences, {self.max_num_batched_tokens:,} tokens a step")
        )
        if self.lora is not None:
            rows += self.lora.rows()
        rows += [(op, choice.text(every_reason=every_reason)) for op, choice in self.backends.items()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def make_plan(config: EngineConfig, model_path: Path) -> EnginePlan:
    """Plan an engine. ValueError, naming the key, where the configuration and the model or machine do not
    agree."""
    hf_config = load_hf_config(model_path)
    device = "cpu"
    dtype = checkpoint_dtype(hf_config) if config.dtype == "auto" else config.dtype
    adapters = initial_adapters(config)
    has_lora = bool(adapters) or config.lora.allow_runtime_loading
    wanted = resolve(config.quantization.format, config.quantization.targets, read_config(hf_config))
    capabilities = Capabilities(device=device, dtype=dtype, weights=wanted.format)
    backends = _choose_backends(config, capabilities, has_lora=has_lora)
    cache_dtype = dtype if config.cache.dtype == "auto" else config.cache.dtype
    context = _build_context(
        {op: choice.name for op, choice in backends.items()},
        capabilities,
        cache_dtype,
        config.cache.state_dtype,
        config.max_model_len,
        torch.device("meta"),
        config.lora.max_loaded,
        wanted,
    )
    model = build_model(hf_config, context)
    quantization = plan_quantization(context)
    max_model_len = _max_model_len(config.max_model_len, model.max_position_embeddings)
    layout = _layout(config, context, max_model_len)
    return EnginePlan(
        model=str(config.model),
        architecture=hf_config["architectures"][0],
        device=device,
        dtype=dtype,
        cache_dtype=cache_dtype,
        state_dtype=config.cache.state_dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        layout=layout,
        backends=backends,
        parameters_total=context.weights.num_parameters,
        parameters_active=round(context.weights.num_active_parameters),
        weight_bytes=context.weights.num_bytes,
        quantization=quantization,
        lora=plan_lora(config, adapters, context),
    )


def build_context(plan: EnginePlan, device: torch.device) -> BuildContext:
    """What layers are built from, as the plan says."""
    quantization = Quantization() if plan.quantization is None else plan.quantization.quantization
    return _build_context(
        {op: choice.name for op, choice in plan.backends.items()},
        Capabilities(device=plan.device, dtype=plan.dtype, weights=quantization.format),
        plan.cache_dtype,
        plan.state_dtype,
        plan.max_model_len,
        device,
        0 if plan.lora is None else plan.lora.num_slots,
        quantization,
    )


def bare_context(dtype: str, quantization: Quantization) -> BuildContext:
    """For a model that is only looked at: no memory, nothing to compute."""
    return _build_context(
        {op: "reference" for op in OPERATORS if op != "lora"},
        Capabilities(device="cpu", dtype=dtype),
        dtype,
        "float32",
        None,
        torch.device("meta"),
        0,
        quantization,
    )


def _build_context(
    chosen: Mapping[str, str],
    capabilities: Capabilities,
    cache_dtype: str,
    state_dtype: str,
    max_model_len: int | None,
    device: torch.device,
    num_adapter_slots: int,
    quantization: Quantization,
) -> BuildContext:
    backends = {op: select(op, name, capabilities).backend for op, name in chosen.items()}
    moe = cast("MoEBackend", backends["moe"])
    lora = None
    if "lora" in backends:
        lora = LoraRegistry(cast("LoraBackend", backends["lora"]), num_adapter_slots)
    return BuildContext(
        dtype=getattr(torch, capabilities.dtype),
        device=device,
        tp=TPGroup.single(),
        formats=make_policy(quantization, cast("GemmBackend", backends["gemm"]), moe, capabilities),
        attention=cast("AttentionBackend", backends["attention"]),
        ssm=cast("SSMBackend", backends["ssm"]),
        moe=moe,
        pointwise=cast("PointwiseBackend", backends["pointwise"]),
        cache_dtype=cache_dtype,
        state_dtype=state_dtype,
        max_model_len=max_model_len,
        lora=lora,
    )


def _choose_backends(
    config: EngineConfig, capabilities: Capabilities, *, has_lora: bool
) -> dict[str, BackendChoice]:
    chosen = {}
    used = [op for op in OPERATORS if op != "lora" or has_lora]
    native.prepare(native.sources(used))
    for op in used:
        wanted = getattr(config.kernels, op)
        if op == "moe" and wanted == AUTO and config.kernels.gemm == EXACT:
            wanted = EXACT
        choice = select(op, wanted, capabilities)
        chosen[op] = BackendChoice(choice.name, choice.rejected, choice.obstacles)
    return chosen


def _max_model_len(wanted: int | None, limit: int | None) -> int:
    if wanted is None:
        return limit or UNLIMITED_MODEL_LEN
    if limit is not None and wanted > limit:
        raise ValueError(
            f"max_model_len: {wanted} is above the {limit} positions that the model was made for"
        )
    return wanted


def _layout(config: EngineConfig, context: BuildContext, max_model_len: int) -> CacheLayout:
    cache, scheduler = config.cache, config.scheduler

    def layout(arena_bytes: int) -> CacheLayout:
        return CacheLayout.build(context.cache_specs, cache.block_size, arena_bytes, max_model_len)

    def longest(arena_bytes: int) -> float:
        """Tokens of one sequence that an arena of this size holds."""
        try:
            tokens = layout(arena_bytes).max_tokens_one_sequence()
        except ValueError:  # not even two slabs
            return 0
        return math.inf if tokens is None else tokens

    layout(1 << 62)  # raises for what more memory would not help
    total = total_memory()
    if cache.memory_bytes is not None:
        budget = cache.memory_bytes
        source = f"cache.memory_bytes: {size_text(budget)}"
        if budget > total:
            raise ValueError(f"{source} is more than the {size_text(total)} of memory that this machine has")
    else:
        free = max(available_memory() - context.weights.num_bytes, 0)
        budget = int(cache.memory_fraction * free)
        source = f"cache.memory_fraction: {cache.memory_fraction} of {size_text(free)} free memory"
    if (fits := longest(budget)) < max_model_len:
        needed = _smallest_size(lambda arena_bytes: longest(arena_bytes) >= max_model_len)
        if not fits:
            raise ValueError(
                f"{source} is too small an arena for a sequence of max_model_len ({max_model_len:,}) "
                f"or any other: give the cache {needed}"
            )
        raise ValueError(
            f"{source} holds one sequence of {fits:,} tokens at most, not of max_model_len "
            f"({max_model_len:,}): set max_model_len to {fits} or less, or give the cache {needed}"
        )
    planned = layout(budget)
    if cache.memory_bytes is None:
        # fewer slabs than MIN_SLABS would be cut anew, with more padding
        wanted = max(1 + planned.slabs_for(max_model_len, scheduler.max_num_seqs), MIN_SLABS)
        if wanted < planned.num_slabs:
            planned = layout(wanted * planned.slab_bytes)
    return planned


def _smallest_size(is_enough: Callable[[int], bool]) -> str:
    """About the least number of bytes that is enough, as text that reads back as a number that is."""
    enough = 1
    while not is_enough(enough):
        enough *= 2
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    unit, num_bytes = next(
        (unit, num_bytes) for unit, num_bytes in reversed(UNITS.items()) if num_bytes <= enough
    )
    tenths = math.ceil(enough * 10 / num_bytes)
    while not is_enough(int(tenths / 10 * num_bytes)):  # what is read back is rounded down
        tenths += 1
    return f"{tenths / 10:.1f} {unit}"


def total_memory() -> int:
    """Bytes that this process could take at most: the machine's, or its control group's limit."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max")
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or what its control group leaves."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no control group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # cached pages of files count as used, but make room when it is needed
        available = min(available, limit - used + int(stat["inactive_file"]))
    return max(available, 0)
