"""Paged attention: every backend against the reference, with everything a sequence does not own poisoned."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.kernels.attention import BACKENDS, plan, torch_native
from hybridserve.kernels.attention.interface import AttentionBackend, AttentionMetadata
from hybridserve.kernels.attention.native import MAX_ROWS, PIECE, SOURCE, Native, _scratch
from hybridserve.kernels.attention.reference import Reference
from hybridserve.kernels.attention.torch_native import TorchNative
from hybridserve.kernels.registry import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator

POISONS = [float("nan"), 1e3]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""A few roundings (eps) of a result of size about 1."""


@dataclass
class Shape:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


class Arena:
    """Blocks that each hold several layers' K and V and a gap that rounds them up to 64 bytes."""

    def __init__(self, shape: Shape, num_blocks: int, poison: float, layers: int = 2) -> None:
        layer = 2 * shape.block_size * shape.kv_heads * shape.head_dim
        size = shape.dtype.itemsize
        stride = -(-(layers * layer * size + 1) // 64) * 64 // size
        self.values = torch.full((num_blocks * stride,), poison, dtype=shape.dtype)
        row = shape.kv_heads * shape.head_dim
        self.layers = [
            self.values.as_strided(
                (num_blocks, 2, shape.block_size, shape.kv_heads, shape.head_dim),
                (stride, shape.block_size * row, row, shape.head_dim, 1),
                i * layer,
            )
            for i in range(layers)
        ]

    def bytes(self) -> torch.Tensor:
        return self.values.view(torch.uint8)


class Case:
    """Sequences of (context, query) lengths on shuffled blocks; layer 1 has the contexts in its cache."""

    def __init__(
        self, lengths: list[tuple[int, int]], shape: Shape, seed: int, poison: float = float("nan")
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        need = [-(-(context + rows) // shape.block_size) for context, rows in lengths]
        num_blocks = sum(need) + 4
        numbers = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.shape, self.lengths = shape, lengths
        self.tables = [[numbers.pop() for _ in range(n)] for n in need]
        self.arena = Arena(shape, num_blocks, poison)
        self.cache = self.arena.layers[1]
        count = sum(rows for _, rows in lengths)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(shape.dtype)

        # As a layer has them: three views of one projection's output.
        width = shape.heads + 2 * shape.kv_heads
        packed = random(count, width, shape.head_dim)
        self.query, self.key, self.value = torch.split(
            packed, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )
        for table, (context, _) in zip(self.tables, lengths, strict=True):
            for position in range(context):
                block, offset = table[position // shape.block_size], position % shape.block_size
                self.cache[block, :, offset] = random(2, shape.kv_heads, shape.head_dim)

    def metadata(self) -> AttentionMetadata:
        return make_metadata(self.lengths, self.tables, self.shape.block_size)

    def run(
        self, backend: AttentionBackend, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        return self.run_part(backend, slice(None), self.metadata(), window, softcap)

    def run_part(
        self,
        backend: AttentionBackend,
        rows: slice,
        metadata: AttentionMetadata,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """These rows of the batch, which `metadata` describes, on the whole cache."""
        return backend.forward(
            self.query[rows],
            self.key[rows],
            self.value[rows],
            self.cache,
            backend.prepare(metadata),
            scale=self.shape.scale,
            window=window,
            softcap=softcap,
        )

    def run_in_chunks(self, backend: AttentionBackend, chunks: list[int], window: int | None) -> torch.Tensor:
        """The only sequence, in as many steps as there are chunks."""
        outputs, start = [], 0
        for rows in chunks:
            metadata = make_metadata([(start, rows)], self.tables, self.shape.block_size)
            outputs.append(self.run_part(backend, slice(start, start + rows), metadata, window))
            start += rows
        return torch.cat(outputs)


def make_metadata(
    lengths: list[tuple[int, int]], tables: list[list[int]], block_size: int, extra_columns: int = 2
) -> AttentionMetadata:
    contexts, rows = [c for c, _ in lengths], [q for _, q in lengths]
    columns = max([len(table) for table in tables], default=0) + extra_columns
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, (context, count) in zip(tables, lengths, strict=True)
        for position in range(context, context + count)
    ]
    block_table = [table + [0] * (columns - len(table)) for table in tables]
    return AttentionMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(rows)]),
        seq_lens=torch.tensor([c + q for c, q in lengths], dtype=torch.int64),
        block_table=torch.tensor(block_table, dtype=torch.int64).reshape(len(tables), columns),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        query_lens=rows,
        context_lens=contexts,
    )


def assert_matches_reference(
    lengths: list[tuple[int, int]],
    shape: Shape,
    window: int | None = None,
    poison: float = float("nan"),
    seed: int = 0,
    *,
    backend: AttentionBackend,
    softcap: float | None = None,
) -> None:
    ours, reference = (Case(lengths, shape, seed, poison) for _ in range(2))
    result = ours.run(backend, window, softcap)
    expected = reference.run(Reference(), window, softcap)
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(ours.arena.bytes(), reference.arena.bytes())


def made(backend: type[AttentionBackend]) -> AttentionBackend:
    if reason := backend.why_not(Capabilities("cpu", "float32")):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


@pytest.fixture
def native() -> Native:
    return made(Native)


@pytest.fixture(params=["native", "flash", "plain"])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionBackend:
    """All but the reference; torch_native by torch's CPU kernel, and by the products of other devices."""
    if request.param == "native":
        return made(Native)
    if request.param == "plain":
        monkeypatch.setattr(torch_native, "_flash_is_right", lambda: False)
        monkeypatch.setattr(torch_native, "SCORE_ELEMENTS", 64)
    return TorchNative()


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


MIXED = [(0, 7), (13, 1), (9, 5), (0, 1), (4, 1), (8, 4), (31, 1), (0, 33)]


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_ragged_batches(ours: AttentionBackend, window: int | None, poison: float) -> None:
    assert_matches_reference(MIXED, Shape(), window, poison, backend=ours)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
def test_head_shapes(ours: AttentionBackend, group: int, head_dim: int) -> None:
    shape = Shape(heads=2 * group, kv_heads=2, head_dim=head_dim)
    assert_matches_reference([(0, 5), (6, 3), (9, 1), (2, 1)], shape, backend=ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 5])
def test_half_precision(ours: AttentionBackend, dtype: torch.dtype, window: int | None) -> None:
    assert_matches_reference(MIXED, Shape(dtype=dtype), window, backend=ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_scores_are_capped(
    ours: AttentionBackend, softcap: float, window: int | None, dtype: torch.dtype
) -> None:
    """Far below the scores, where what is hidden would count if it were capped too, and far above them, where
    a score must keep its last digits."""
    assert_matches_reference(MIXED, Shape(dtype=dtype), window, backend=ours, softcap=softcap)


def test_a_cap_bounds_scores() -> None:
    """Gemma 2's formula over one head, in float64; a cap that nothing reaches changes next to nothing."""
    case, softcap = Case([(0, 6)], Shape(heads=1, kv_heads=1), 0), 0.7
    query, keys, values = (x[:, 0].double() for x in (case.query, case.key, case.value))
    scores = softcap * torch.tanh(query @ keys.T * case.shape.scale / softcap)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    plain = Case([(0, 6)], Shape(heads=1, kv_heads=1), 0).run(Reference())
    actual = case.run(Reference(), softcap=softcap)
    torch.testing.assert_close(actual[:, 0].double(), expected, atol=2e-6, rtol=2e-6)
    assert (actual - plain).abs().max() > 0.1
    torch.testing.assert_close(case.run(Reference(), softcap=1e4), plain, atol=1e-5, rtol=1e-5)


def test_the_cache_may_have_another_type(ours: AttentionBackend) -> None:
    """What is attended to is what the cache holds, whether it was cached now or in an earlier step."""
    cases = [Case(MIXED, Shape(dtype=torch.bfloat16), 0) for _ in range(2)]
    for case in cases:
        generator = torch.Generator().manual_seed(1)
        case.query, case.key, case.value = (
            x.float() + 1e-3 * torch.randn(x.shape, generator=generator)
            for x in (case.query, case.key, case.value)
        )
    results = [case.run(backend) for case, backend in zip(cases, (ours, Reference()), strict=True)]
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(*results, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_block_sizes(ours: AttentionBackend, block_size: int) -> None:
    for window in (None, 4):
        assert_matches_reference(MIXED, Shape(block_size=block_size), window, backend=ours)


def test_f021_decodes_and_prefills_in_every_order(ours: AttentionBackend) -> None:
    for order in itertools.permutations([(5, 1), (12, 1), (0, 6), (7, 3)]):
        assert_matches_reference(list(order), Shape(), poison=1e3, backend=ours)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("window", [None, 6])
def test_f014_a_prompt_cut_anywhere_is_the_same_prompt(
    ours: AttentionBackend, window: int | None, poison: float
) -> None:
    whole = Case([(0, 24)], Shape(), 0, poison)
    expected = whole.run(ours, window)
    cuts = [[cut, 24 - cut] for cut in range(1, 24)] + [[1] * 24, [5] * 4 + [4]]
    for chunks in cuts:
        case = Case([(0, 24)], Shape(), 0, poison)
        actual = case.run_in_chunks(ours, chunks, window)
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=2e-6)
        assert torch.equal(case.arena.bytes(), whole.arena.bytes())


@pytest.mark.parametrize("window", [None, 6])
def test_company_does_not_matter(ours: AttentionBackend, window: int | None) -> None:
    case = Case(MIXED, Shape(), 3)
    together = torch.split(case.run(ours, window), [rows for _, rows in MIXED])
    fresh, row = Case(MIXED, Shape(), 3), 0
    for table, (context, rows), expected in zip(fresh.tables, MIXED, together, strict=True):
        metadata = make_metadata([(context, rows)], [table], fresh.shape.block_size)
        result = fresh.run_part(ours, slice(row, row + rows), metadata, window)
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
        row += rows


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("threads")
def test_bits_of_native_depend_on_nothing_but_the_sequence(
    native: Native, dtype: torch.dtype, window: int | None
) -> None:
    """In chunks of any size, among others, in any order and on any number of threads: the same bits."""
    shape = Shape(heads=6, kv_heads=2, head_dim=20, block_size=16, dtype=dtype)
    total = 210
    whole = Case([(0, total)], shape, 0)
    torch.set_num_threads(1)
    expected = whole.run(native, window)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for chunks in ([1] * total, [64, 64, 64, 18], [33, 1, 100, 1, 75], [209, 1], [total]):
            actual = Case([(0, total)], shape, 0).run_in_chunks(native, chunks, window)
            assert torch.equal(actual, expected)

        mixed = [(130, 1), (0, 70), (64, 64), (63, 1), (0, 100), (90, 33), (1, 2)]
        case = Case(mixed, shape, 3)
        parts = torch.split(case.run(native, window), [rows for _, rows in mixed])
        starts = [0, *itertools.accumulate(rows for _, rows in mixed)]
        for order in ([6, 5, 4, 3, 2, 1, 0], [3], [2, 0], [4, 4]):
            take = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order])
            metadata = make_metadata([mixed[i] for i in order], [case.tables[i] for i in order], 16)
            inputs = (x[take] for x in (case.query, case.key, case.value))
            actual = native.forward(*inputs, case.cache, metadata, scale=shape.scale, window=window)
            assert torch.equal(actual, torch.cat([parts[i] for i in order]))


PIECES = [(2 * PIECE + 3, 1), (2 * PIECE - 2, 5), (40, 1), (PIECE - 1, 1), (PIECE, 2)]
"""One token, a few that reach into the next piece, some with one piece, one that just ends it."""


@pytest.mark.parametrize("window", [None, 30, PIECE + 9])
@pytest.mark.parametrize("head_dim", [20, 64])
@pytest.mark.usefixtures("threads")
def test_pieces_of_a_long_sequence(native: Native, head_dim: int, window: int | None) -> None:
    """A call whose longest task is more than a thread's share: it has the bits of one thread, of every
    sequence alone and of prompts in chunks."""
    shape = Shape(heads=3, kv_heads=1, head_dim=head_dim, block_size=16)
    case = Case(PIECES, shape, 1)
    torch.set_num_threads(1)
    expected = case.run(native, window)
    assert_matches_reference(PIECES, shape, window, seed=1, backend=native)
    starts = [0, *itertools.accumulate(rows for _, rows in PIECES)]
    for num_threads in (2, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(case.run(native, window), expected)
        for i in range(len(PIECES)):
            rows = slice(starts[i], starts[i + 1])
            metadata = make_metadata([PIECES[i]], [case.tables[i]], 16)
            assert torch.equal(case.run_part(native, rows, metadata, window), expected[rows])
    total = 2 * PIECE + 40
    whole = Case([(0, total)], shape, 0)
    expected = whole.run(native, window)
    for chunks in ([total - 1, 1], [PIECE, 1, 500, 51]):
        assert torch.equal(Case([(0, total)], shape, 0).run_in_chunks(native, chunks, window), expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kv_heads", "is_shared"), [(1, True), (4, False)])
def test_threads_share_one_sequence_s_pieces(
    native: Native, monkeypatch: pytest.MonkeyPatch, kv_heads: int, is_shared: bool
) -> None:
    """Where there are fewer KV heads than threads; what a thread has of a piece lies in the scratch."""
    given: list[torch.Tensor] = []

    def poisoned(metadata: AttentionMetadata, group: int, head_dim: int) -> torch.Tensor | None:
        scratch = _scratch(metadata, group, head_dim)
        assert scratch is not None
        given.append(scratch.fill_(torch.nan))
        return scratch

    monkeypatch.setattr("hybridserve.kernels.attention.native._scratch", poisoned)
    torch.set_num_threads(2)
    Case([(6 * PIECE, 1)], Shape(heads=4, kv_heads=kv_heads, head_dim=64, block_size=16), 0).run(native)
    assert bool((~given[0].isnan()).any()) == is_shared


def test_short_sequences_have_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scratch is made for them, nor for a thread alone."""
    short, long = (make_metadata([(context, 1)], [[1] * 200], 4) for context in (PIECE - 1, PIECE))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert _scratch(short, 2, 16) is None
    scratch = _scratch(long, 2, 20)
    assert scratch is not None
    assert len(scratch) == 9 * 2 * (32 + 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert _scratch(long, 2, 20) is None


def test_sizes_are_the_source_s() -> None:
    source = SOURCE.read_text()
    assert f"#define PIECE {PIECE} " in source
    assert f"#define MAX_ROWS {MAX_ROWS}\n" in source


def test_any_strides(ours: AttentionBackend) -> None:
    """Elements of a head apart from each other, in what is given and in the cache."""
    case = Case(MIXED, Shape(), 0)
    expected = Case(MIXED, Shape(), 0).run(Reference())
    spread = torch.full((*case.cache.shape, 3), float("nan"))
    spread[..., 1] = case.cache
    case.cache = spread[..., 1]
    case.query, case.key, case.value = (
        torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
        for x in (case.query, case.key, case.value)
    )
    torch.testing.assert_close(case.run(ours), expected, atol=2e-6, rtol=2e-6)
    assert spread[..., ::2].isnan().all()


def test_a_row_of_nan_is_alone(native: Native) -> None:
    """Queries of one sequence, in the same registers: what one is does not reach the others."""
    shape, lengths = Shape(), [(20, 9)]
    expected = Case(lengths, shape, 0).run(native)
    case = Case(lengths, shape, 0)
    case.query[4] = float("nan")
    actual = case.run(native)
    assert actual[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("window", [None, 3, 11, 40])
def test_tiles_are_merged(
    ours: AttentionBackend, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of many tiles, and windows of many spans and tiles, at sizes a test can afford."""
    monkeypatch.setattr(torch_native, "CPU_TILE_BYTES", 1)
    monkeypatch.setattr(plan, "WINDOW_ROWS", 4)
    lengths = [(61, 1), (0, 30), (45, 23), (3, 1), (0, 1), (39, 2)]
    for block_size in (1, 4, 6):
        assert_matches_reference(lengths, Shape(block_size=block_size), window, backend=ours)


def test_window_masks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MASK_ELEMENTS", 256)
    metadata = TorchNative().prepare(make_metadata([(9, 70), (0, 70), (3, 1)], [[*range(1, 21)]] * 3, 4))
    masks = [tile.mask for group in plan.make_plan(metadata, 4, 20, 1024).paged for tile in group.tiles]
    assert max(mask.numel() for mask in masks if mask is not None) <= 256
    assert_matches_reference([(9, 70), (0, 70), (3, 1)], Shape(), window=20, backend=TorchNative())


def test_a_window_reads_nothing_before_it(ours: AttentionBackend) -> None:
    """The blocks that a window has left may have been given away."""
    shape = Shape()
    for lengths in ([(21, 1)], [(21, 6)], [(21, 1), (30, 1), (17, 3)]):
        case = Case(lengths, shape, 0)
        expected = case.run(ours, window=5)
        gone = Case(lengths, shape, 0)
        for table, (context, _) in zip(gone.tables, lengths, strict=True):
            for block in table[: (context - 4) // shape.block_size]:
                gone.cache[block] = float("nan")
            for column in range((context - 4) // shape.block_size):
                table[column] = 0
        torch.testing.assert_close(gone.run(ours, window=5), expected)


def test_many_short_rows_are_few_rectangles() -> None:
    lengths = [(3 * i % 97, 1) for i in range(64)]
    case = Case(lengths, Shape(), 0)
    made = plan.make_plan(case.metadata(), 4, None, 1 << 16)
    assert len(made.paged) <= 4
    alike = plan.make_plan(make_metadata([(9, 1)] * 8, [[1, 2, 3]] * 8, 4), 4, None, 1 << 16)
    assert [group.rows.tokens for group in alike.paged] == [slice(0, 8)]  # nothing is copied to be batched
    assert_matches_reference(lengths, Shape(), backend=TorchNative())


def test_empty_batch(ours: AttentionBackend) -> None:
    case = Case([], Shape(), 0)
    before = case.arena.bytes().clone()
    assert case.run(ours).shape == (0, 4, 16)
    assert torch.equal(case.arena.bytes(), before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [[0, 1, 2, 2], [2, 0, 2, 1], [2, 2, 1, 0]])
def test_f026_padding_rows_are_harmless(backend: type[AttentionBackend], order: list[int]) -> None:
    shape = Shape()
    live = [(9, 1), (6, 3)]
    case = Case(live, shape, 0)
    expected = torch.split(Case(live, shape, 0).run(Reference()), [1, 3])
    lengths, tables = [*live, (0, 1)], [*case.tables, [0]]
    rows = [range(1), range(1, 4), range(1)]
    take = torch.tensor([row for which in order for row in rows[which]])
    guarded = torch.ones(len(case.cache), dtype=torch.bool)
    guarded[[0, *itertools.chain(*case.tables)]] = False
    before = case.cache[guarded].clone().view(torch.uint8)
    instance = made(backend)
    metadata = make_metadata([lengths[i] for i in order], [tables[i] for i in order], shape.block_size)
    result = instance.forward(
        case.query[take],
        case.key[take],
        case.value[take],
        case.cache,
        instance.prepare(metadata),
        scale=shape.scale,
    )
    parts = torch.split(result, [len(rows[which]) for which in order])
    assert result.isfinite().all()
    for which, part in zip(order, parts, strict=True):
        if which < 2:
            torch.testing.assert_close(part, expected[which], atol=2e-6, rtol=2e-6)
    assert torch.equal(case.cache[guarded].view(torch.uint8), before)


@pytest.mark.parametrize(
    "live", [[(21, 1)], [(16, 1)], [(5, 1)] * 3, [(21, 1), (9, 1)], [(0, 7)], [(9, 5), (0, 7), (6, 1)]]
)
def test_f031_a_padding_row_changes_no_bit(ours: AttentionBackend, live: list[tuple[int, int]]) -> None:
    shape = Shape()
    expected = Case(live, shape, 0).run(ours)
    case = Case(live, shape, 0)
    metadata = ours.prepare(make_metadata([*live, (0, 1)], [*case.tables, [0]], shape.block_size))
    query, key, value = (torch.cat((x, x[:1])) for x in (case.query, case.key, case.value))
    result = ours.forward(query, key, value, case.cache, metadata, scale=shape.scale)
    assert torch.equal(result[:-1], expected)


def test_a_write_changes_its_slots_only(ours: AttentionBackend) -> None:
    """Other layers, other blocks, other offsets and the gap between blocks keep their bytes."""
    lengths = [(5, 2), (11, 1)]
    case = Case(lengths, Shape(), 0, poison=1e3)
    written = torch.zeros_like(case.arena.values, dtype=torch.bool)
    view = written.as_strided(case.cache.shape, case.cache.stride(), case.cache.storage_offset())
    slots = case.metadata().slot_mapping
    view[slots // 4, :, slots % 4] = True
    before = case.arena.values.clone()
    case.run(ours)
    assert torch.equal(case.arena.values[~written], before[~written])
    assert not torch.isclose(case.arena.values[written], before[written]).any()
    torch.testing.assert_close(case.cache[slots // 4, 0, slots % 4], case.key)
    torch.testing.assert_close(case.cache[slots // 4, 1, slots % 4], case.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_f073_offsets_past_32_bits(backend: type[AttentionBackend]) -> None:
    """Blocks just past 2^31 elements (and 2^32 bytes more) of lazily committed memory."""
    shape, instance = Shape(), made(backend)
    inner = 2 * shape.block_size * shape.kv_heads * shape.head_dim
    num_blocks, stride = 9, (1 << 28) + 64
    values = torch.empty(num_blocks * stride, dtype=shape.dtype)
    row = shape.kv_heads * shape.head_dim
    cache = values.as_strided(
        (num_blocks, 2, shape.block_size, shape.kv_heads, shape.head_dim),
        (stride, shape.block_size * row, row, shape.head_dim, 1),
        stride - inner,
    )
    small = Case([(0, 6), (0, 1)], shape, 0)
    low = range(1, 7)
    cache[list(low)] = 7.0
    small.tables = [[8, 7], [0]]
    expected = Case([(0, 6), (0, 1)], shape, 0).run(Reference())
    arguments = (small.query, small.key, small.value, cache, instance.prepare(small.metadata()))
    torch.testing.assert_close(instance.forward(*arguments, scale=shape.scale), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(cache[8, 0], small.key[:4])
    assert (cache[list(low)] == 7.0).all()

    # Continue: the far blocks are now read back as context.
    longer = Case([(0, 7)], shape, 0)
    longer.query[:6], longer.key[:6], longer.value[:6] = small.query[:6], small.key[:6], small.value[:6]
    whole = longer.run(Reference())[6:]
    step = instance.prepare(make_metadata([(6, 1)], [[8, 7]], shape.block_size))
    last = (longer.query[6:], longer.key[6:], longer.value[6:], cache, step)
    torch.testing.assert_close(instance.forward(*last, scale=shape.scale), whole, atol=2e-6, rtol=0)


def test_f074_a_chunk_over_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """200K tokens of context, a chunk and a decode: equal to a plain softmax, within bounded memory."""
    shape, context, rows = Shape(heads=2, kv_heads=1, head_dim=8, block_size=16), 200_000, 96
    need = -(-(context + rows) // shape.block_size)
    generator = torch.Generator().manual_seed(0)
    arena = Arena(shape, need + 1, float("nan"), layers=1)
    cache = arena.layers[0]
    keys, values = torch.randn(2, context + rows, 8, generator=generator)
    table = (torch.randperm(need, generator=generator) + 1).tolist()
    position = torch.arange(context)
    blocks, offsets = torch.tensor(table)[position // 16], position % 16
    cache[blocks, 0, offsets, 0], cache[blocks, 1, offsets, 0] = keys[:context], values[:context]
    query = torch.randn(rows, 2, 8, generator=generator)
    largest: list[int] = []
    gather = torch_native._gather

    def measured(*arguments: Any) -> torch.Tensor:
        gathered = gather(*arguments)
        largest.append(2 * gathered.numel() * gathered.element_size())
        return gathered

    monkeypatch.setattr(torch_native, "_gather", measured)
    native = TorchNative()
    metadata = native.prepare(make_metadata([(context, rows)], [table], 16))
    result = native.forward(
        query, keys[context:, None], values[context:, None], cache, metadata, scale=shape.scale
    )
    scores = torch.einsum("qhd,ld->hql", query.double(), keys.double()) * shape.scale
    hidden = torch.arange(context + rows) > torch.arange(context, context + rows)[:, None]
    expected = torch.softmax(scores.masked_fill_(hidden, -torch.inf), -1) @ values.double()
    torch.testing.assert_close(result.double(), expected.transpose(0, 1), atol=2e-6, rtol=0)
    assert len(largest) > 1
    assert max(largest) <= torch_native.CPU_TILE_BYTES
