"""What the ranks of the tests do: functions of a `Rank`, which `RankPool.run` runs on all of them at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.config.loader import load_config
from hybridserve.engine.planner import make_plan, offered_modules
from hybridserve.kernels.lora.reference import Reference as ReferenceLora
from hybridserve.layers import linear, mamba1, mamba2, norm
from hybridserve.layers.embedding import VocabParallelEmbedding
from hybridserve.layers.lora import LoraRegistry
from hybridserve.models.config import load_hf_config
from hybridserve.models.weights import load_model
from hybridserve.quant.compressed_tensors import read_config
from hybridserve.quant.format import Shard, part_of
from hybridserve.quant.policy import Quantization
from hybridserve.quant.scaled import ScaledFormat
from tests.harness import adapters
from tests.harness.adapters import AdaptedRunner
from tests.harness.models import Backends, Runner, load_runner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hybridserve.kernels.lora.interface import LoraBatch
    from hybridserve.layers.lora import AdaptableModule
    from hybridserve.lora.layers import PlacedAdapter
    from tests.distributed.harness import Rank


def runner_of(rank: Rank, path: Path, **options: Any) -> Runner:
    return load_runner(path, tp=rank.tp, pipeline=rank.pipeline, **options)


def run_model(
    rank: Rank,
    path: Path,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    fault: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Logits [tokens, vocab] where they are (else empty), and this rank's states."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        runner = runner_of(rank, path, **options)
        return {"logits": runner.run(ids, chunk), "states": runner.states()}


def count_collectives(rank: Rank, path: Path, ids: Sequence[int], **options: Any) -> dict[str, int]:
    """Of one step in which all tokens are sampled."""
    runner = runner_of(rank, path, **options)
    before = _counts(rank)
    runner.run(ids)
    return {name: count - before[name] for name, count in _counts(rank).items()}


def _counts(rank: Rank) -> dict[str, int]:
    tp, pipeline = (getattr(group, "counters", None) for group in (rank.tp, rank.pipeline))
    return {
        "reductions": tp.num_all_reduces if tp else 0,
        "gathers": tp.num_gathers if tp else 0,
        "others": tp.num_all_gathers if tp else 0,
        "bytes": tp.num_bytes if tp else 0,
        "sends": pipeline.num_sends if pipeline else 0,
        "sent_bytes": pipeline.num_bytes if pipeline else 0,
    }


def codes(
    rank: Rank,
    path: Path,
    format_name: str | None,
    targets: Sequence[str],
    *,
    fault: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What this rank's quantized modules hold, by name: codes, scales, and where its rows and its columns are
    in the module."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return codes_of(path, format_name, targets, tp=rank.tp, pipeline=rank.pipeline, **options)


def codes_of(path: Path, format_name: str | None, targets: Sequence[str], **options: Any) -> dict[str, Any]:
    """`format_name` None: as the checkpoint is."""
    registry = LoraRegistry(ReferenceLora(), 1)
    quantization = None if format_name is None else Quantization(format_name, tuple(targets))
    if quantization is None:
        quantization = read_config(load_hf_config(path))
    context = Backends().context(lora=registry, quantization=quantization, **options)
    load_model(path, context)
    found: dict[str, Any] = {}
    for name, module in registry.modules.items():
        if context.formats.formats.get(name, context.formats.plain) is context.formats.plain:
            continue
        base = module.base
        assert isinstance(base, functools.partial)
        owner = base.func.__self__
        if isinstance(owner, linear.Projection):
            (rows,) = base.args
            held = [torch.cat([owner.weights[kind][part] for part in rows]) for kind in ("codes", "scales")]
        else:
            weights, group, part = base.args
            held = [
                part_of(weights[f"gate_up.{kind}"][group], weights[f"down.{kind}"][group], part)
                for kind in ("codes", "scales")
            ]
        rows = [(part.source.start, part.source.stop) for part in module.outputs]
        found[name] = (*held, rows, (module.inputs.start, module.inputs.stop))
    return found


def run_adapter(
    rank: Rank,
    path: Path,
    adapter: Path,
    ids: Sequence[int],
    *,
    chunk: int | None = None,
    shown: Sequence[str] = (),
    fault: str | None = None,
    expert_parallel: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Logits with and without an adapter where they are, the bytes that it takes here, and the pairs (start,
    A, B) that this rank has for some modules."""
    modules = all_modules(path, rank.topology.tensor, rank.topology.pipeline, expert_parallel)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        runner = AdaptedRunner(
            path,
            tp=rank.tp,
            pipeline=rank.pipeline,
            expert_parallel=expert_parallel,
            modules=modules,
            **options,
        )
        placed = runner.install(1, adapter)
        pairs = {
            name: [(pair.start, pair.A, pair.B) for pair in module.table.pairs(1, module.group)]
            for name, module in runner.modules.items()
            if name in shown
        }
        return {
            "logits": runner.logits(ids, 1, chunk=chunk),
            "base": runner.logits(ids),
            "num_bytes": placed.num_bytes,
            "pairs": pairs,
        }


def all_modules(
    path: Path, tensor: int, pipeline: int, expert_parallel: bool
) -> Mapping[str, AdaptableModule]:
    """What all ranks of a topology offer, as the planner finds it."""
    options = {
        "parallel": {"tensor": tensor, "pipeline": pipeline, "expert": expert_parallel},
        "lora": {"allow_runtime_loading": True, "roots": [str(path)]},
        "max_model_len": 64,
        "memory_bytes": "1MiB",
    }
    config = load_config(str(path), None, options)
    return offered_modules(make_plan(config, path), load_hf_config(path))


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextlib.contextmanager
def out_proj_is_not_reduced() -> Iterator[None]:
    """F065."""

    class Partial(linear.RowParallelLinear):
        def __call__(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            part = self.projection(x, lora)
            is_out = self.projection.outputs.placements[0].module == "out_proj"
            return part if is_out else self.tp.all_reduce(part)

    with replaced(mamba1, "RowParallelLinear", Partial), replaced(mamba2, "RowParallelLinear", Partial):
        yield


def parts_of_groups_are_normed() -> contextlib.AbstractContextManager[None]:
    """F066."""

    def shared(self: norm.GroupedRMSNorm, x: torch.Tensor) -> torch.Tensor:
        return self.backend.rms_norm(x, self.weight, self.eps, (x.shape[1],))

    return replaced(norm.GroupedRMSNorm, "_shared", shared)


def in_proj_is_cut_as_one() -> contextlib.AbstractContextManager[None]:
    """J4."""

    class OneSlice(linear.OutputSlices):
        def __init__(self, name: str, slices: Any, tp: Any) -> None:
            if slices[0].module == "in_proj":
                slices = [linear.OutputSlice("in_proj", sum(s.num_rows for s in slices))]
            super().__init__(name, slices, tp)

    return replaced(linear, "OutputSlices", OneSlice)


def partial_sums_are_normed() -> contextlib.AbstractContextManager[None]:
    """J5."""

    class NormedPart(linear.RowParallelLinear):
        def __call__(self, x: torch.Tensor, lora: Any) -> torch.Tensor:
            part = self.projection(x, lora)
            if self.projection.outputs.placements[0].module == "x_proj":
                part = part / part.pow(2).mean(-1, keepdim=True).sqrt()
            return self.tp.all_reduce(part)

    return replaced(mamba1, "RowParallelLinear", NormedPart)


def rows_are_quantized_after_the_cut() -> contextlib.AbstractContextManager[None]:
    """Scales that depend on how many ranks there are."""

    def load(
        self: ScaledFormat, codes: torch.Tensor, scales: torch.Tensor, source: Any, shard: Shard
    ) -> None:
        quantized = self.quantize_rows(source[shard.source])
        codes[shard.destination], scales[shard.destination[0]] = quantized.codes, quantized.scales

    return replaced(ScaledFormat, "_load", load)


def adapters_of_in_proj_are_cut_as_one() -> contextlib.AbstractContextManager[None]:
    """L025: B's rows as if in_proj were one slice."""

    def cut_as_one(
        self: linear.Projection,
        registry: LoraRegistry,
        name: str,
        num_inputs: int,
        inputs: slice,
        partial: bool,
    ) -> None:
        plain_offer(self, registry, name, num_inputs, inputs, partial)
        if "in_proj" in self.outputs.module_rows:
            module = registry.modules[f"{name}.in_proj"]
            first, second = module.outputs
            half = second.source.stop - second.source.start
            shifted = second._replace(source=slice(first.source.stop, first.source.stop + half))
            registry.modules[module.name] = dataclasses.replace(module, outputs=(first, shifted))

    plain_offer = linear.Projection._offer
    return replaced(linear.Projection, "_offer", cut_as_one)


def heads_are_not_shared() -> contextlib.AbstractContextManager[None]:
    """L029: B's rows of k and v by this rank's number, not by the head that it shares."""

    def not_shared(
        self: linear.Projection,
        registry: LoraRegistry,
        name: str,
        num_inputs: int,
        inputs: slice,
        partial: bool,
    ) -> None:
        plain_offer(self, registry, name, num_inputs, inputs, partial)
        for part in {"k_proj", "v_proj"} & self.outputs.module_rows.keys():
            module = registry.modules[f"{name}.{part}"]
            (rows,) = module.outputs
            size = rows.source.stop - rows.source.start
            other = (rows.source.start + size) % module.out_features
            moved = rows._replace(source=slice(other, other + size))
            registry.modules[module.name] = dataclasses.replace(module, outputs=(moved,))

    plain_offer = linear.Projection._offer
    return replaced(linear.Projection, "_offer", not_shared)


def ranks_of_pairs_are_cut() -> contextlib.AbstractContextManager[None]:
    """L026, L028: each rank has its share of r, and nobody gathers."""

    def cut(adapter: Any, modules: Any, dtype: Any, device: Any, tp: Any) -> PlacedAdapter:
        placed = plain_place(adapter, modules, dtype, device, tp)
        for index, (table, group, pairs) in enumerate(placed.pairs):
            kept = []
            for pair in pairs:
                share = len(pair.B) // tp.size
                mine = slice(tp.rank * share, (tp.rank + 1) * share)
                A = pair.A[:, mine] if pair.A.shape[-1] == len(pair.B) else pair.A[mine]
                kept.append(dataclasses.replace(pair, A=A.contiguous(), B=pair.B[mine].contiguous()))
            placed.pairs[index] = (table, group, tuple(kept))
        return placed

    plain_place = adapters.place_adapter
    return replaced(adapters, "place_adapter", cut)


def tokens_of_other_ranks_are_adapted() -> contextlib.AbstractContextManager[None]:
    """L032: those that this rank's part of the vocabulary doesn't have, as if they were its first."""

    def adapt(
        self: VocabParallelEmbedding, hidden: torch.Tensor, local_ids: torch.Tensor, lora: LoraBatch | None
    ) -> None:
        plain_adapt(self, hidden, local_ids.clamp(min=0), lora)

    plain_adapt = VocabParallelEmbedding._adapt
    return replaced(VocabParallelEmbedding, "_adapt", adapt)


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "f065": out_proj_is_not_reduced,
    "f066": parts_of_groups_are_normed,
    "j4": in_proj_is_cut_as_one,
    "j5": partial_sums_are_normed,
    "l025": adapters_of_in_proj_are_cut_as_one,
    "l026": ranks_of_pairs_are_cut,
    "l032": tokens_of_other_ranks_are_adapted,
    "l029": heads_are_not_shared,
    "late": rows_are_quantized_after_the_cut,
}
