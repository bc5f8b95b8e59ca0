"""`hybridserve bench`: reads its arguments, runs the load, and says what came of it.

Knows terminals, files and signals. Whatever a user did wrong is found before anything is sent, where that is
possible, and raised as ValueError.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridserve.bench.connect import make_target
from hybridserve.bench.load import ClosedLoop, OpenLoop, Run
from hybridserve.bench.plot import check_plot, draw
from hybridserve.bench.progress import progress_bar
from hybridserve.bench.report import Context, Report
from hybridserve.bench.slo import Slo
from hybridserve.bench.target import TargetRequest, is_chat
from hybridserve.bench.workload_file import read_workload
from hybridserve.bench.workloads import Drawing, make_workload, take, with_adapters
from hybridserve.core.request import SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine, Iterator, Mapping

    from hybridserve.bench.target import Target
    from hybridserve.bench.workloads import Conversation, Workload

BASE = "base"
"""In --adapters, the base model."""
REHEARSED_TOKENS = 2
WARMUP_SEED = 1_000_003
"""Added to the seed: prompts that were warmed up with are not those that are measured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """failure: why not a single request succeeded, or nothing."""

    was_interrupted: bool
    failure: str


def run(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> Outcome:
    """Runs the benchmark, prints the report and writes the files that were asked for.

    `engine_options`: keyword arguments of AsyncLLM. Raises ValueError and OSError for a user's mistake.
    """
    slo = None if args.slo is None else Slo.parse(args.slo)
    SamplingParams(temperature=args.temperature or 0.0)  # or it says what is wrong
    _check_together(args)
    for path in filter(None, (args.json, args.plot)):
        _check_writable(path)
    if args.plot is not None:
        check_plot(args.plot)
    from_file = None
    if args.workload.endswith(".jsonl"):
        from_file = read_workload(Path(args.workload), temperature=args.temperature)
    target = make_target(args, engine_options)
    report = asyncio.run(_measure(args, target, from_file, slo))
    sys.stdout.write(report.text())
    sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        draw(report, args.plot)
    failure = ""
    if not any(record.is_ok for record in report.records):
        failed = [record.error for record in report.records if record.error is not None]
        failure = f"no request succeeded: {failed[0]}" if failed else "no request ended"
    return Outcome(report.context.was_interrupted, failure)


def _check_together(args: argparse.Namespace) -> None:
    if args.rate is not None and args.concurrency is not None:
        raise ValueError("--concurrency: is a closed loop, --rate an open one; give one of them")
    if args.arrivals is not None and args.rate is None:
        raise ValueError("--arrivals: is for an open loop; give --rate, too")
    if args.think and args.turns == 1 and not args.workload.endswith(".jsonl"):
        raise ValueError("--think: is for conversations; give --turns, too")
    if args.adapters is None and args.adapter_mix != "uniform":
        raise ValueError("--adapter-mix: needs --adapters")
    _exponent(args.adapter_mix)
    if args.workload.endswith(".jsonl"):
        for name in ("send", "vocab_size"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')}: is for synthetic workloads; a file says what is sent"
                )
        if args.turns > 1:
            raise ValueError('--turns: is for synthetic workloads; a line of a file may have "turns"')


def _exponent(mix: str) -> float:
    """Of the weights 1 / rank ** exponent."""
    if mix == "uniform":
        return 0.0
    match = re.fullmatch(r"zipf(?::(\d+(?:\.\d+)?))?", mix)
    if match is None:
        raise ValueError(f"--adapter-mix: {mix!r} is neither uniform, zipf nor zipf:EXPONENT")
    return float(match[1] or 1)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{path}: is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: {path.parent} is not a directory")


async def _measure(
    args: argparse.Namespace, target: Target, from_file: Workload | None, slo: Slo | None
) -> Report:
    async with target:
        adapters = await _adapters(args, target, from_file)
        drawing = Drawing(
            seed=args.seed,
            form=args.send or "ids",
            vocab_size=args.vocab_size or target.vocab_size,
            limit=target.max_model_len,
            num_turns=args.turns,
            temperature=args.temperature or 0.0,
        )
        workload = from_file or make_workload(args.workload, drawing)
        warming = from_file or make_workload(args.workload, replace(drawing, seed=args.seed + WARMUP_SEED))
        load = _load(args, workload)
        num_requests = args.num_requests
        if num_requests is None and args.duration is None:
            num_requests = workload.num_requests

        def conversations(source: Workload, seed: int) -> Iterator[Conversation]:
            found = source.conversations()
            if adapters is None:
                return found
            return with_adapters(found, adapters, _exponent(args.adapter_mix), seed)

        await _rehearse(args, target, next(conversations(warming, args.seed)))
        warm_up = Run(target, args.timeout)
        concurrency = load.concurrency if isinstance(load, ClosedLoop) else args.warmup
        await warm_up.go(
            take(conversations(warming, args.seed + WARMUP_SEED), args.warmup), ClosedLoop(concurrency)
        )
        measured = conversations(workload, args.seed)
        begin_time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with progress_bar(num_requests) as watch:
            run = Run(target, args.timeout, think=args.think, duration=args.duration, watch=watch)
            was_interrupted = await _until_interrupted(
                run.go(measured if num_requests is None else take(measured, num_requests), load)
            )
        context = Context(
            target=target.describe(),
            counts=target.counts,
            workload=workload.name,
            form="the file says" if from_file else drawing.form,
            seed=args.seed,
            num_turns=args.turns,
            load=load.describe(),
            load_text=str(load),
            num_warmup=args.warmup,
            begin_time=begin_time,
            was_interrupted=was_interrupted,
            num_skipped=run.num_skipped,
        )
        return Report(context, run.records, slo)


def _load(args: argparse.Namespace, workload: Workload) -> ClosedLoop | OpenLoop:
    if args.rate is not None:
        return OpenLoop(args.rate, args.arrivals or "poisson", args.seed)
    return ClosedLoop(args.concurrency or workload.concurrency)


async def _adapters(
    args: argparse.Namespace, target: Target, from_file: Workload | None
) -> list[str | None] | None:
    """Those of --adapters, None for the base model; no list where it was not given. ValueError for one that
    is not served, there or in a file."""
    named: set[str] = set()
    if from_file is not None:
        lines = take(from_file.conversations(), from_file.num_requests)
        named = {line.adapter for line in lines if line.adapter is not None}
    if args.adapters is None and not named:
        return None
    there = await target.adapters()

    def check(name: str, place: str, *others: str) -> None:
        if name not in (*there, *others):
            known = f"there is {', '.join([*there, *others])}" if there else "there is none"
            raise ValueError(f"{place}: {name!r} is not served; {known}")

    for name in sorted(named):
        check(name, f"{args.workload}: adapter")
    if args.adapters is None:
        return None
    if named:
        raise ValueError(f"--adapters: lines of {args.workload} name their own")
    names = [name.strip() for name in args.adapters.split(",") if name.strip()]
    if not names:
        raise ValueError("--adapters: names nothing")
    for name in names:
        check(name, "--adapters", BASE)
    return [None if name == BASE and BASE not in there else name for name in names]


async def _rehearse(args: argparse.Namespace, target: Target, conversation: Conversation) -> None:
    turn = conversation.turns[0]
    request = TargetRequest(
        turn.content,
        min(turn.max_tokens, REHEARSED_TOKENS),
        conversation.adapter,
        conversation.ignore_eos,
        conversation.sampling,
    )
    needs_ids = args.turns > 1 and not is_chat(turn.content) and not isinstance(turn.content, str)
    try:
        async with asyncio.timeout(args.timeout):
            await target.rehearse(request, needs_ids=needs_ids)
    except TimeoutError:
        raise ValueError(f"{args.target}: gave no answer in {args.timeout:g} s (--timeout)") from None


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Until it is done, or the first Ctrl-C, which cancels it; a second one is as ever. True after one."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        task.cancel()

    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread may
        loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return True
    finally:
        if loop.remove_signal_handler(signal.SIGINT):
            signal.signal(signal.SIGINT, before)
    return False
