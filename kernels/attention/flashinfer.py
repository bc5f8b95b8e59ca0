"""Paged attention by the package FlashInfer, where it is installed (arXiv 2501.01005). Knows its interface.

Asked for by name only: it splits what a row sees by how busy the device is, so that a row's bits depend on
its company. What a window has just left behind is masked, not skipped: it must be finite.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.triton_support import cdiv, import_obstacle, rows_of, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.kernels.registry import Capabilities

LEAST_WORKSPACE_BYTES = 128 << 20
"""What the package recommends."""


def workspace_bytes(group: int, head_dim: int, num_multiprocessors: int) -> int:
    """What splitting may take, in all and at most: float32 sums and a log-sum-exp of each row of two tiles a
    multiprocessor, for each head that shares a KV head."""
    tile_rows = 128 if head_dim < 256 else 64
    most = 4 * group * 2 * num_multiprocessors * tile_rows * (head_dim + 1)
    return max(LEAST_WORKSPACE_BYTES, most)


class Pages(NamedTuple):
    """Of some sequences, int32, as the package takes them: ids on the device, what it plans with on the
    host."""

    sums: torch.Tensor  # [n + 1] pages before each sequence's first
    ids: torch.Tensor  # [sums[-1]] on the device
    last_lens: torch.Tensor  # [n] tokens in each sequence's last page


class Part(NamedTuple):
    """Sequences of a step that one call attends for: those with one token, or all others. Tiles are as high
    as a call's average asks for."""

    sequences: list[int]
    tokens: slice | torch.Tensor  # rows of the flat batch


@dataclass(slots=True)
class FlashInferMetadata(AttentionMetadata):
    parts: list[Part] = field(default_factory=list)
    pages: dict[tuple[int, int], Pages] = field(default_factory=dict)
    """By part and block size, made when the first layer asks for them."""
    places: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    """By block size: where the step's K and V go."""

    def pages_of(self, part: int, block_size: int) -> Pages:
        if (part, block_size) not in self.pages:
            self.pages[part, block_size] = self._make_pages(self.parts[part].sequences, block_size)
        return self.pages[part, block_size]

    def _make_pages(self, sequences: Sequence[int], block_size: int) -> Pages:
        device = self.block_table.device
        lens = [self.query_lens[i] + self.context_lens[i] for i in sequences]
        counts = [cdiv(length, block_size) for length in lens]
        sums = [0, *accumulate(counts)]
        rows = torch.repeat_interleave(upload(counts, device), output_size=sums[-1])
        columns = torch.arange(sums[-1], device=device) - upload(sums, device)[rows]
        ids = self.block_table[upload(sequences, device)[rows], columns]
        last_lens = [(length - 1) % block_size + 1 for length in lens]
        return Pages(_int32(sums), ids.int(), _int32(last_lens))

    def places_in(self, block_size: int) -> tuple[torch.Tensor, ...]:
        """Each token of the step as a sequence of one page, its own: `slot_mapping` says where it is written,
        which need not be where its sequence is read."""
        if block_size not in self.places:
            tokens = torch.arange(
                len(self.slot_mapping) + 1, dtype=torch.int32, device=self.slot_mapping.device
            )
            blocks, offsets = self.slot_mapping // block_size, (self.slot_mapping % block_size).int()
            self.places[block_size] = (tokens[:-1], offsets, blocks.int(), tokens, offsets + 1)
        return self.places[block_size]


class Kind(NamedTuple):
    """What is planned for: layers of one kind, and one part of a step."""

    part: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None


class Planned:
    """One wrapper of the package: its plan is of one step, for all layers of a kind.

    It plans in pinned memory that the device copies from when it gets there. Steps are launched ahead, so the
    next plan waits for that copy; it stands before all attention of its step.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.step: FlashInferMetadata | None = None
        self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, step: FlashInferMetadata, kind: Kind) -> None:
        if self.step is step:
            return
        if self.step is not None:
            self._copied.synchronize()
        query_lens = [step.query_lens[i] for i in step.parts[kind.part].sequences]
        self.wrapper.plan(
            _int32([0, *accumulate(query_lens)]),
            *step.pages_of(kind.part, kind.block_size),
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            kind.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.softcap,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
        )
        self._copied.record()
        self.step = step


class FlashInfer(AttentionBackend):
    name = "flashinfer"
    head_dims: ClassVar[tuple[int, ...] | None] = (64, 128, 256)

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        if capabilities.device != "cuda":
            return "no CUDA device"
        if capabilities.dtype not in ("bfloat16", "float16"):
            return f"has no arithmetic for {capabilities.dtype}"
        return import_obstacle("flashinfer", "flashinfer-python")

    def __init__(self) -> None:
        import flashinfer

        self._package: Any = flashinfer
        self._workspaces: dict[int, torch.Tensor] = {}
        """By size. All layers share one: on a stream only one of them runs at a time."""
        self._planned: dict[Kind, Planned] = {}

    def prepare(self, metadata: AttentionMetadata) -> FlashInferMetadata:
        return FlashInferMetadata(
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.slot_mapping,
            metadata.query_lens,
            metadata.context_lens,
            parts=_parts(metadata.query_lens, metadata.seq_lens.device),
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """ValueError for a cache of another dtype than the query's, or without rows of elements side by side:
        the package has none for it."""
        if not isinstance(metadata, FlashInferMetadata):
            raise TypeError("metadata must come from this backend's prepare()")
        if cache.dtype != query.dtype:
            raise ValueError(f"FlashInfer needs K and V in {query.dtype}, not {cache.dtype}")
        if cache.stride(4) != 1:
            raise ValueError("FlashInfer needs the elements of a head of the cache side by side")
        if not len(query):
            return torch.empty_like(query)
        query, key, value = rows_of(query), rows_of(key), rows_of(value)
        block_size, num_kv_heads, head_dim = cache.shape[2:]
        pair = (cache[:, 0], cache[:, 1])
        tokens, offsets, *pages = metadata.places_in(block_size)
        self._package.append_paged_kv_cache(key, value, tokens, offsets, pair, *pages, kv_layout="NHD")
        out = None if len(metadata.parts) == 1 else torch.empty_like(query)
        for number, part in enumerate(metadata.parts):
            kind = Kind(
                *(number, query.shape[1], num_kv_heads, head_dim, block_size),
                *(query.dtype, scale, window, softcap),
            )
            planned = self._planned_for(kind, query.device)
            planned.plan(metadata, kind)
            result: torch.Tensor = planned.wrapper.run(query[part.tokens], pair)
            if out is None:
                return result
            out[part.tokens] = result
        assert out is not None
        return out

    def _planned_for(self, kind: Kind, device: torch.device) -> Planned:
        if kind not in self._planned:
            properties = torch.cuda.get_device_properties(device)
            group = kind.num_heads // kind.num_kv_heads
            size = workspace_bytes(group, kind.head_dim, properties.multi_processor_count)
            if size not in self._workspaces:
                self._workspaces[size] = torch.empty(size, dtype=torch.uint8, device=device)
            # "fa3" takes a page's stride to be a multiple of a token's and counts tokens in 32 bits
            self._planned[kind] = Planned(
                self._package.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspaces[size], "NHD", backend="fa2"
                )
            )
        return self._planned[kind]


def _parts(query_lens: Sequence[int], device: torch.device) -> list[Part]:
    starts = [0, *accumulate(query_lens)]
    groups = [
        [i for i, length in enumerate(query_lens) if (length == 1) is single] for single in (True, False)
    ]
    parts = []
    for sequences in filter(None, groups):
        rows = [row for i in sequences for row in range(starts[i], starts[i + 1])]
        is_run = rows[-1] - rows[0] == len(rows) - 1
        tokens = slice(rows[0], rows[-1] + 1) if is_run else upload(rows, device)
        parts.append(Part(sequences, tokens))
    return parts


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
