"""Several texts that grow at the same time, next to each other on a terminal and one by one elsewhere.

Knows titles and text; does not know where it comes from. Imports the terminal library only on a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REFRESH = 12  # times a second
MIN_WIDTH = 24  # of a column


@contextlib.contextmanager
def side_by_side(titles: Sequence[str], beginning: str) -> Iterator[Callable[[int, str], None]]:
    """Yields a function that adds text to one of the columns; each begins with `beginning`.

    Where standard output is no terminal, all is printed at the end, a labelled block a column.
    """
    texts = [""] * len(titles)
    if not sys.stdout.isatty():
        yield lambda index, piece: texts.__setitem__(index, texts[index] + piece)
        for title, text in zip(titles, texts, strict=True):
            sys.stdout.write(f"--- {title}\n{beginning}{text}\n\n")
        return
    from rich.live import Live

    with Live(refresh_per_second=REFRESH, vertical_overflow="visible") as live:
        width = live.console.width

        def add(index: int, piece: str) -> None:
            texts[index] += piece
            live.update(_render(titles, beginning, texts, width))

        live.update(_render(titles, beginning, texts, width))
        yield add


def _render(titles: Sequence[str], beginning: str, texts: Sequence[str], width: int) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    num_columns = max(1, min(len(titles), width // MIN_WIDTH))
    rows = []
    for first in range(0, len(titles), num_columns):
        table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False)
        shown = slice(first, first + num_columns)
        for title in titles[shown]:
            table.add_column(title, ratio=1, overflow="fold")
        table.add_row(*(Text.assemble((beginning, "bold"), text) for text in texts[shown]))
        rows.append(table)
    return Group(*rows)
