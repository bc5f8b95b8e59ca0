"""The command line: which command does what, and what its user is told when it can't.

What may be typed is in `cli_options`, and what a command does is done by modules that it imports when it
runs, so that `--help` is quick. A user's mistake is a line on standard error for each thing that is wrong and
exit status 2, anything else one block and status 1; a traceback is shown with --verbose alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hybridserve.cli_options import engine_config, engine_options, parse, sampling_options
from hybridserve.commands.failure import MISTAKE, PREFIX, CommandFailed, report
from hybridserve.commands.table import table
from hybridserve.interrupt import INTERRUPTED, ending_unwinds, interrupt_exits_at_once, interrupt_prevails

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

BROKEN_PIPE = 141  # as a shell says of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its status."""
    if sys.stderr is None:  # it was closed, and print() would write to standard output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    if sys.stdout is None:
        sys.stderr.write(f"{PREFIX}standard output is closed\n")
        sys.exit(MISTAKE)
    with interrupt_exits_at_once():
        args = parse(sys.argv[1:] if argv is None else argv)
    try:
        with interrupt_prevails():
            COMMANDS[args.command](args)
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has no reader; the interpreter must not try to write it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except Exception as error:
        as_json = vars(args).get("log_format") == "json"
        sys.exit(report(args.command, error, verbose=args.verbose, as_json=as_json))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _generate(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.commands.generate import run

    run(args)


def _inspect(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.commands.inspect import run

    run(args)


def _config(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.commands.settings import run

    run(args)


def _completion(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.completion import script

    print(script(args.shell), end="")


def _plan(args: argparse.Namespace) -> None:
    config = engine_config(args)
    with interrupt_exits_at_once():
        from hybridserve.engine.alternatives import plan_or_suggest
        from hybridserve.models.hub import resolve_config

    if args.plot is not None and args.plot.is_dir():
        raise ValueError(f"--plot: {args.plot} is a directory; a file is needed, such as plan.png")
    hf_config, shape = resolve_config(config.model)
    plan = plan_or_suggest(config, hf_config, shape=shape)
    if args.plot is not None:
        with interrupt_exits_at_once():
            from hybridserve.engine.plan_plot import draw_plan
        draw_plan(plan, args.plot)
    if args.json:
        print(json.dumps(plan.to_dict(), indent=2))
        return
    print(plan.table())
    if not plan.is_projected:
        print("decode     not projected: this machine's speed isn't known; --hardware cpu is two Zen 4 cores")


def _quantize(args: argparse.Namespace) -> None:
    targets = None
    if args.targets is not None:
        targets = tuple(name.strip() for name in args.targets.split(",") if name.strip())
        if not targets:
            raise ValueError("--targets: names nothing")
    with interrupt_exits_at_once():
        from hybridserve.engine.convert import REPORT_FILE, quantize_checkpoint
        from hybridserve.engine.new_directory import check_new, leftovers
        from hybridserve.models.hub import resolve_model

    for path in leftovers(args.out):
        print(f"hybridserve: {path}: of a run that was killed, or has not ended", file=sys.stderr)
    with ending_unwinds():
        check_new(args.out)  # before a model is fetched
        report = quantize_checkpoint(resolve_model(args.model), args.out, args.format, targets)
    size = f"{report.bytes_after / report.bytes_before:.0%} of {report.bytes_before:,} bytes"
    plan = report.plan  # how products will be computed is for the engine that serves it to say
    how = f"{plan.quantization.format}, {plan.share:.1%} of the parameters"
    rows = [("quantization", how), ("", plan.kinds)]
    print(table([*rows, ("written", f"{args.out}: {size}; every module is listed in {REPORT_FILE}")]))


def _serve(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.server.logs import phase, set_up_logging
    set_up_logging(args.log_format, verbose=args.verbose)
    with interrupt_exits_at_once(), phase("configuration"):
        config = engine_config(args, **({"server.api_keys": args.api_key} if args.api_key else {}))
    with interrupt_exits_at_once(), phase("import of the server"):
        try:
            from hybridserve.server.serve import serve
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is missing: pip install 'hybridserve[server]'") from None
    status = serve(config)
    if status:
        sys.exit(status)


def _chat(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.chat import run

    if failure := run(args, engine_options(args), sampling_options(args)):
        raise CommandFailed(failure)


def _bench(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.bench.command import run

    outcome = run(args, engine_options(args))
    if outcome.was_interrupted:
        sys.exit(INTERRUPTED)
    if outcome.failure:
        raise CommandFailed(outcome.failure)


COMMANDS = {
    "bench": _bench,
    "chat": _chat,
    "completion": _completion,
    "config": _config,
    "serve": _serve,
    "generate": _generate,
    "inspect": _inspect,
    "plan": _plan,
    "quantize": _quantize,
}
