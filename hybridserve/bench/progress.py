"""How far a run is, on a terminal; elsewhere nothing. Imports the terminal library only on a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hybridserve.bench.load import Run


@contextlib.contextmanager
def progress_bar(num_requests: int | None) -> Iterator[Callable[[Run], None]]:
    """Yields what is to be called with the run whenever a request is sent or has ended."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            "{task.fields[running]} running, {task.fields[tokens]:,} tokens, {task.fields[failed]} failed"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=num_requests, running=0, tokens=0, failed=0)
        num_seen = num_tokens = num_failed = 0

        def show(run: Run) -> None:
            nonlocal num_seen, num_tokens, num_failed
            for record in run.records[num_seen:]:
                num_seen += 1
                num_tokens += record.num_output_tokens
                num_failed += not record.is_ok
            progress.update(
                task, completed=num_seen, running=run.num_running, tokens=num_tokens, failed=num_failed
            )

        yield show
