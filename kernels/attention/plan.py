"""Cuts a step's ragged batch into a few rectangles of work, and derives the index tensors each one needs.

Knows lengths, blocks and rows of the batch; knows no query, key or value.

A *span* is a run of one sequence's tokens and the range of cached positions they read. Spans of similar shape
are padded to one *rectangle* [count, width] of rows, so that one call attends for all of them:

    prompt (part) of several tokens     causal over itself, from the batch   } merged by their log-sum-exp
      ... and what was cached before    every row reads [0, context)         }
    single token                        reads [0, position], itself included
    several tokens, sliding window      each row reads [position - window + 1, position], itself included

Keys are gathered from the cache a *tile* at a time. Only a span longer than a tile has several, and then it
is alone in its rectangle: memory stays bounded and everything else takes one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hybridserve.kernels.attention.interface import AttentionMetadata

PADDING_TOKENS = 512
"""Padding that is always worth one call less: a call costs tens of microseconds."""

WINDOW_ROWS = 256
"""Rows of a windowed span: the mask of one is [rows, rows + window]."""

MASK_ELEMENTS = 1 << 21


class Span(NamedTuple):
    sequence: int
    row: int  # first of its tokens in the flat batch
    rows: int
    first: int  # first cached position that any of its rows reads
    last: int  # one past the last


@dataclass(slots=True)
class Rows:
    """A rectangle of rows of the flat batch. Short spans are padded with copies of their last row."""

    count: int
    width: int
    tokens: slice | torch.Tensor  # [count * width] rows of the batch
    real: torch.Tensor | None  # which of them are not padding; None: all
    targets: slice | torch.Tensor  # rows of the batch that the real ones are

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] -> [count, width, ...]"""
        x = x[self.tokens] if isinstance(self.tokens, slice) else x.index_select(0, self.tokens)
        return x.view(self.count, self.width, *x.shape[1:])

    def drop_padding(self, x: torch.Tensor) -> torch.Tensor:
        """x [count, width, ...] -> [rows that are real, ...]"""
        x = x.flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)


@dataclass(slots=True)
class Tile:
    """Keys of a rectangle, gathered as whole blocks [count, blocks], then cut to `start .. stop`."""

    blocks: torch.Tensor  # [count * blocks] block ids
    start: int
    stop: int
    unowned: torch.Tensor | None  # positions of the gathered tile that hold no span's values
    mask: torch.Tensor | None  # [count, 1, width or 1, stop - start], 0 or -inf
    blind: torch.Tensor | None  # [count, 1, width] rows that see nothing of this tile


@dataclass(slots=True)
class Paged:
    rows: Rows
    tiles: list[Tile]
    continues: bool  # its rows have already attended to their own chunk


@dataclass(slots=True)
class Plan:
    blocks: torch.Tensor  # [T] where each token's K and V go
    offsets: torch.Tensor  # [T]
    causal: list[Rows]
    paged: list[Paged]
    merges: bool  # some rows get their output in parts


def make_plan(metadata: AttentionMetadata, block_size: int, window: int | None, tile_tokens: int) -> Plan:
    """Plan a step for layers of this block size and window, gathering about `tile_tokens` keys at a time."""
    causal: list[Span] = []
    contexts: list[Span] = []
    singles: list[Span] = []
    windowed: list[Span] = []
    row = 0
    lengths = zip(metadata.query_lens, metadata.context_lens, strict=True)
    for sequence, (rows, context) in enumerate(lengths):
        end = context + rows
        if rows == 1:
            singles.append(Span(sequence, row, 1, max(0, end - window) if window else 0, end))
        elif window and window < end:
            windowed += _window_spans(sequence, row, rows, context, window)
        else:
            causal.append(Span(sequence, row, rows, 0, 0))
            if context:
                contexts.append(Span(sequence, row, rows, 0, context))
        row += rows

    # A row's own position must lie in the first tile of its span, wherever in a block the span ends.
    tile_blocks = max(2, -(-max(tile_tokens, 2 * WINDOW_ROWS) // block_size))
    device = metadata.block_table.device
    paged = [
        Paged(
            _rows(group, device),
            _tiles(group, metadata, block_size, tile_blocks, window if banded else None),
            continues,
        )
        for spans, banded, continues in (
            (contexts, False, True),
            (singles, False, False),
            (windowed, True, False),
        )
        for group in _pack(spans, block_size, tile_blocks, banded)
    ]
    return Plan(
        blocks=metadata.slot_mapping // block_size,
        offsets=metadata.slot_mapping % block_size,
        causal=[_rows(group, device) for group in _pack(causal, block_size, tile_blocks, banded=False)],
        paged=paged,
        merges=bool(contexts) or any(len(group.tiles) > 1 for group in paged),
    )


def _window_spans(sequence: int, row: int, rows: int, context: int, window: int) -> list[Span]:
    step = min(WINDOW_ROWS, max(1, MASK_ELEMENTS // (window + WINDOW_ROWS)))
    return [
        Span(sequence, row + start, stop - start, max(0, context + start - window + 1), context + stop)
        for start in range(0, rows, step)
        for stop in (min(rows, start + step),)
    ]


def _pack(spans: list[Span], block_size: int, tile_blocks: int, banded: bool) -> list[list[Span]]:
    """Spans whose rows and blocks differ by little share a rectangle; its spans are in batch order."""
    sized = [
        (max(4, (span.rows - 1).bit_length()), -(-span.last // block_size) - span.first // block_size, span)
        for span in spans
    ]
    sized.sort(reverse=True)
    groups: list[list[Span]] = []
    kind = widest = used = 0
    for bucket, blocks, span in sized:
        if bucket == kind:
            total = (len(groups[-1]) + 1) * widest
            padding = (total - used - blocks) * block_size
            if (
                total <= tile_blocks
                and padding <= PADDING_TOKENS + used * block_size // 4
                and not (banded and total * block_size << bucket > MASK_ELEMENTS)
            ):
                groups[-1].append(span)
                used += blocks
                continue
        groups.append([span])
        kind, widest, used = bucket, blocks, blocks
    for group in groups:
        group.sort(key=attrgetter("row"))
    return groups


def _rows(spans: list[Span], device: torch.device) -> Rows:
    width = max(span.rows for span in spans)
    count = len(spans)
    start = spans[0].row
    if all(span.rows == width and span.row == start + i * width for i, span in enumerate(spans)):
        run = slice(start, start + count * width)
        return Rows(count, width, run, None, run)
    rows = torch.tensor([span.rows for span in spans], device=device)
    column = torch.arange(width, device=device)
    tokens = torch.tensor([span.row for span in spans], device=device)[:, None]
    tokens = (tokens + torch.minimum(column, rows[:, None] - 1)).flatten()
    if all(span.rows == width for span in spans):
        return Rows(count, width, tokens, None, tokens)
    real = (column < rows[:, None]).flatten().nonzero().flatten()
    return Rows(count, width, tokens, real, tokens[real])


def _tiles(
    spans: list[Span], metadata: AttentionMetadata, block_size: int, tile_blocks: int, window: int | None
) -> list[Tile]:
    """Latest keys first: every row sees some of the first tile, so that its log-sum-exp is always finite."""
    num_blocks = max(-(-span.last // block_size) - span.first // block_size for span in spans)
    return [
        _tile(spans, metadata, block_size, window, slice(max(0, stop - tile_blocks), stop), num_blocks)
        for stop in range(num_blocks, 0, -tile_blocks)
    ]


def _tile(
    spans: list[Span],
    metadata: AttentionMetadata,
    block_size: int,
    window: int | None,
    part: slice,
    num_blocks: int,
) -> Tile:
    """`part` of each span's `num_blocks` blocks, the first of which holds its first position."""
    device = metadata.block_table.device
    size = (part.stop - part.start) * block_size
    origins = [span.first - span.first % block_size + part.start * block_size for span in spans]
    cuts = {
        (max(0, span.first - origin), min(size, span.last - origin))
        for span, origin in zip(spans, origins, strict=True)
    }
    whole = part.stop - part.start == num_blocks
    # Single rows use whole blocks even where one length fits all: padding rows that join change no bit then.
    exact = len(cuts) == 1 and not (whole and spans[0].rows == 1)
    start, stop = cuts.pop() if exact else (0, size)

    numbers = [(*span, origin) for span, origin in zip(spans, origins, strict=True)]
    columns = torch.tensor(numbers, device=device).T[:, :, None]
    sequence, _, rows, first, end, base = columns
    entries = torch.arange(part.stop - part.start, device=device)
    if not exact:
        used = (end - base + (block_size - 1)) // block_size
        entries = torch.where(entries < used, entries, 0)  # a shorter span is padded with its first block
    blocks = metadata.block_table[sequence, base // block_size + entries].flatten()
    if exact and window is None:
        return Tile(blocks, start, stop, None, None, None)

    positions = base + torch.arange(size, device=device)
    unowned = None
    if not exact:
        # The end of the last block is nobody's yet; so are the copies of a first block that is the last, too.
        foreign = (positions >= end) & ((positions < base + used * block_size) | (end - base < block_size))
        unowned = foreign.flatten().nonzero().flatten()
    if window is None:
        visible = ((positions >= first) & (positions < end))[:, None]
    else:
        index = torch.arange(max(span.rows for span in spans), device=device)
        query = (end - rows + torch.minimum(index, rows - 1))[:, :, None]
        positions = positions[:, None, start:stop]
        visible = (positions <= query) & (positions > query - window)
    mask = torch.zeros(visible.shape, device=device).masked_fill_(visible.logical_not(), -torch.inf)[:, None]
    blind = None if whole else visible.any(-1).logical_not()[:, None]
    return Tile(blocks, start, stop, unowned, mask, blind)
