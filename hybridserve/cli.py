"""The command line: serve, generate, inspect, plan.

Knows files and terminals; what may be typed is in `cli_options`, and what a command does is done by modules
that it imports when it runs, so that `--help` is quick. A user's mistake is one line on standard error and
exit status 2, never a traceback.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybridserve import __version__
from hybridserve.cli_options import USAGE_ERROR, engine_options, has_engine_options, parse, sampling_options
from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.distributed.failure import RankFailure
from hybridserve.interrupt import INTERRUPTED, ending_unwinds, interrupt_exits_at_once, interrupt_prevails

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.llm import LLM
    from hybridserve.outputs import Logprobs, RequestOutput

FAILED = 1
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER = "adapter"
"""What `inspect` calls the one that it looks at."""
BROKEN_PIPE = 141  # as a shell says of a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its status."""
    if sys.stderr is None:  # it was closed, and print() would write to standard output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    if sys.stdout is None:
        _exit(USAGE_ERROR, "standard output is closed")
    try:
        with interrupt_exits_at_once():
            args = parse(sys.argv[1:] if argv is None else argv)
        with interrupt_prevails():
            COMMANDS[args.command](args)
            sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # What is still buffered has no reader; the interpreter must not try to write it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)
        _exit(USAGE_ERROR, _one_line(error))
    except RankFailure as error:
        _exit(FAILED, str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _exit(status: int, reason: str) -> NoReturn:
    print(f"hybridserve: {reason}", file=sys.stderr)
    sys.exit(status)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _engine_config(args: argparse.Namespace, **more: object) -> EngineConfig:
    from hybridserve.config.loader import load_config

    options = {**engine_options(args), **more}
    model, file = options.pop("model", None), options.pop("config", None)
    return load_config(model, file, options, with_keys=args.command == "serve")


def _generate(args: argparse.Namespace) -> None:
    params = SamplingParams(**sampling_options(args))
    if args.prompts is not None:
        _generate_file(args, params)
        return
    if args.out is not None:
        raise ValueError("--out: is for the results of --prompts")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise ValueError(f"--{name}: is only reported for --prompts")
    if args.compare and (args.adapter is not None or params.n > 1):
        raise ValueError("--compare: shows every adapter once; leave out --adapter and --n")
    with _load(args) as llm:
        llm.check(args.prompt, params, adapter=args.adapter)
        print(llm.plan.table(), file=sys.stderr)
        if args.compare:
            _compare(llm, args.prompt, params)
        elif params.n > 1:
            _generate_several(llm, args.prompt, params, args.adapter)
        else:
            _generate_stream(llm, args.prompt, params, args.adapter)


def _load(args: argparse.Namespace) -> LLM:
    with interrupt_exits_at_once():
        from hybridserve.llm import LLM
    return LLM(**engine_options(args))


def _compare(llm: LLM, prompt: str, params: SamplingParams) -> None:
    from hybridserve.side_by_side import side_by_side

    names = [None, *(info.name for info in llm.list_adapters())]
    with side_by_side([name or "the base model" for name in names], prompt) as add:
        outputs = llm.generate([prompt] * len(names), params, adapter=names, progress=False, watch=add)
    _exit_if_aborted(outputs)


def _generate_several(llm: LLM, prompt: str, params: SamplingParams, adapter: str | None) -> None:
    completions = llm.generate(prompt, params, adapter=adapter)[0].outputs
    for completion in completions:
        print(f"[{completion.index}] {completion.text}")
    aborted = [each for each in completions if each.finish_reason == FinishReason.ABORT]
    if aborted:
        sys.stdout.flush()
        _exit(FAILED, f"[{aborted[0].index}] was aborted: {aborted[0].stop_reason}")


def _generate_stream(llm: LLM, prompt: str, params: SamplingParams, adapter: str | None) -> None:
    from hybridserve.outputs import StreamAborted

    shown = sys.stdout.isatty()
    if shown:
        print(prompt, end="", flush=True)
    try:
        for piece in llm.stream(prompt, params, adapter=adapter):
            print(piece, end="", flush=True)
            shown = True
    except StreamAborted as error:
        if shown:
            print(flush=True)
        _exit(FAILED, str(error))
    print()


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a file of prompts, and where it stands."""

    origin: str
    prompt: str | list[int]
    params: SamplingParams
    adapter: str | None


def _generate_file(args: argparse.Namespace, params: SamplingParams) -> None:
    if args.compare:
        raise ValueError("--compare: is for one --prompt")
    lines = list(_read_prompts(args.prompts, params, args.adapter))
    if args.out is not None:
        folder = _without_links(args.out).parent
        if args.out.is_dir():
            raise ValueError(f"--out: {args.out} is a directory")
        if not args.out.exists() and not folder.is_dir():
            raise ValueError(f"--out: {folder} is not a directory")
    with _load(args) as llm:
        for line in lines:
            try:
                llm.check(line.prompt, line.params, adapter=line.adapter)
            except ValueError as error:
                raise ValueError(f"{line.origin}: {error}") from None
        print(llm.plan.table(), file=sys.stderr)
        outputs = llm.generate(
            [line.prompt for line in lines],
            [line.params for line in lines],
            adapter=[line.adapter for line in lines],
        )
    results = (
        json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n"
        for line, output in zip(lines, outputs, strict=True)
        for result in _results(line, output)
    )
    if args.out is None:
        sys.stdout.writelines(results)
    else:
        _write(args.out, results)
    _exit_if_aborted(outputs)


def _exit_if_aborted(outputs: Sequence[RequestOutput]) -> None:
    completions = [completion for output in outputs for completion in output.outputs]
    if aborted := [each for each in completions if each.finish_reason == FinishReason.ABORT]:
        sys.stdout.flush()
        counted = f"{len(aborted)} of {len(completions)} results"
        _exit(FAILED, f"{counted} ended early (finish_reason abort): {aborted[0].stop_reason}")


def _write(path: Path, results: Iterable[str]) -> None:
    """Whoever reads a regular file sees all results or none; a device or a pipe is written to as it is."""
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            file.writelines(results)
        return
    target = _without_links(path)  # a link stays, and what it points to is replaced
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(results)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _without_links(path: Path) -> Path:
    if path.is_symlink():
        with contextlib.suppress(FileNotFoundError):  # what a link points to need not be there yet
            path.stat()  # links that go in a circle are an OSError
    return Path(os.path.realpath(path))  # Path.resolve() knows no OSError for them


def _read_prompts(path: Path, params: SamplingParams, adapter: str | None) -> Iterator[_Line]:
    allowed = {field.name for field in fields(SamplingParams)}
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                if not isinstance(line, dict) or "prompt" not in line:
                    raise ValueError('a line is an object with "prompt"')
                prompt, named = line.pop("prompt"), line.pop("adapter", adapter)
                if unknown := sorted(line.keys() - allowed):
                    raise ValueError(
                        f"{unknown[0]}: unknown; allowed are prompt, adapter, {', '.join(sorted(allowed))}"
                    )
                if "logit_bias" in line:
                    line["logit_bias"] = _with_int_keys(line["logit_bias"])
                yield _Line(f"{path}:{number}", prompt, replace(params, **line), named)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _with_int_keys(bias: Any) -> Any:
    """JSON has no other keys than text. What is no mapping is for SamplingParams to refuse."""
    if not isinstance(bias, dict):
        return bias
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError:
        raise ValueError(f"logit_bias: {', '.join(map(repr, bias))}: must map token ids to numbers") from None


def _results(line: _Line, output: RequestOutput) -> Iterator[dict[str, Any]]:
    for completion in output.outputs:
        result: dict[str, Any] = {
            "prompt": line.prompt,
            "adapter": line.adapter,
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
        }
        if completion.logprobs is not None:
            result["cumulative_logprob"] = _finite(completion.cumulative_logprob)
            result["logprobs"] = [_logprobs(position) for position in completion.logprobs]
        if output.prompt_logprobs is not None:
            result["prompt_logprobs"] = [
                position and _logprobs(position) for position in output.prompt_logprobs
            ]
        yield result


def _logprobs(position: Logprobs) -> list[dict[str, Any]]:
    return [
        {"token_id": token_id, **asdict(logprob), "logprob": _finite(logprob.logprob)}
        for token_id, logprob in position.items()
    ]


def _finite(number: float | None) -> float | None:
    """None for what JSON has no number for: a broken model's log-probabilities are."""
    return number if number is not None and math.isfinite(number) else None


def _inspect(args: argparse.Namespace) -> None:
    if args.models:
        if args.target or args.on or has_engine_options(args):
            raise ValueError("--models: lists what any model may be; leave out MODEL_OR_YAML and settings")
        from hybridserve.models.registry import ARCHITECTURES

        print("\n".join(sorted(ARCHITECTURES)))
        return
    if args.target is None and has_engine_options(args):
        raise ValueError("MODEL_OR_YAML: is needed to see what a setting would do")
    if args.target and _is_adapter(args.target):
        _inspect_adapter(args)
        return
    if args.on is not None:
        raise ValueError(f"--on: {args.target} is no adapter's directory")
    config = None if args.target is None else _engine_config(args)
    with interrupt_exits_at_once():
        from hybridserve.engine.alternatives import plan_or_suggest
        from hybridserve.engine.arena_plan import DoesNotFitError
        from hybridserve.engine.checkpoint_report import checkpoint_rows
        from hybridserve.models.config import load_hf_config
        from hybridserve.models.hub import resolve_model
        from hybridserve.models.weights import has_weights

        rows = list(_machine())
    if config is None:
        rows += _backends()
        print(_table(rows))
        return
    path = resolve_model(config.model)
    print(_table(rows))
    is_checkpoint = has_weights(path)
    print(_table(checkpoint_rows(config, path) if is_checkpoint else [("checkpoint", "config.json alone")]))
    try:
        print(plan_or_suggest(config, load_hf_config(path)).table(every_reason=True))
    except DoesNotFitError as error:
        if not is_checkpoint:
            raise
        print(f"does not fit  {error}")  # the checkpoint is what was asked for, and it is whole


def _is_adapter(target: str) -> bool:
    try:
        return any((Path(target) / name).is_file() for name in ADAPTER_FILES)
    except OSError:  # such as a name that is too long
        return False


def _inspect_adapter(args: argparse.Namespace) -> None:
    """An adapter's layout; with --on, what of it that model would apply."""
    path, model, options = Path(args.target), args.on, engine_options(args)
    if model is None and has_engine_options(args):
        raise ValueError("--on: is needed to see what a setting would do with an adapter")
    with interrupt_exits_at_once():
        from hybridserve.lora import describe
    print(_table(list(describe.layout(path))))
    if model is None:
        return
    with interrupt_exits_at_once():
        from hybridserve.llm import LLM

    del options["model"]
    with LLM(model, **{**options, "lora.adapters": {ADAPTER: str(path)}}) as llm:
        (info,) = llm.list_adapters()
    rows = [("identity", info.identity), ("device", f"{info.device_bytes:,} bytes, rank {info.rank}")]
    print(_table([*rows, *describe.report(info.report)]))


def _machine() -> Iterator[tuple[str, str]]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from hybridserve.engine.planner import available_memory

    yield "hybridserve", __version__
    yield "python", sys.version.split()[0]
    for package in ("torch", "transformers", "safetensors", "tokenizers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
    yield "device", "cpu"
    yield "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    yield "memory", f"{available_memory() / 2**30:.1f} GiB available"


def _backends() -> Iterator[tuple[str, str]]:
    from hybridserve.engine.planner import OPERATORS
    from hybridserve.kernels import native
    from hybridserve.kernels.registry import Capabilities, select

    native.prepare(native.sources(OPERATORS))
    for operator in OPERATORS:
        choice = select(operator, "auto", Capabilities(device="cpu", dtype="float32"))
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.rejected)
        yield operator, f"{choice.name} ({reasons})" if reasons else choice.name


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _plan(args: argparse.Namespace) -> None:
    config = _engine_config(args)
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
    print(_table([*rows, ("written", f"{args.out}: {size}; every module is listed in {REPORT_FILE}")]))


def _serve(args: argparse.Namespace) -> None:
    config = _engine_config(args, **({"server.api_keys": args.api_key} if args.api_key else {}))
    with interrupt_exits_at_once():
        try:
            from hybridserve.server.logs import set_up_logging
            from hybridserve.server.serve import serve
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is missing: pip install 'hybridserve[server]'") from None
    set_up_logging(args.log_format, verbose=args.verbose)
    status = serve(config)
    if status:
        sys.exit(status)


def _chat(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.chat import run

    if failure := run(args, engine_options(args), sampling_options(args)):
        _exit(FAILED, failure)


def _bench(args: argparse.Namespace) -> None:
    with interrupt_exits_at_once():
        from hybridserve.bench.command import run

    outcome = run(args, engine_options(args))
    if outcome.was_interrupted:
        sys.exit(INTERRUPTED)
    if outcome.failure:
        _exit(FAILED, outcome.failure)


COMMANDS = {
    "bench": _bench,
    "chat": _chat,
    "serve": _serve,
    "generate": _generate,
    "inspect": _inspect,
    "plan": _plan,
    "quantize": _quantize,
}
