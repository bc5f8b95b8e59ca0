"""The command line: generate, inspect, plan.

Knows arguments, files and terminals; what a command does is done by the modules that it imports when it runs,
so that `--help` is quick. A user's mistake is one line on standard error and exit status 2, never a
traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybridserve import __version__
from hybridserve.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hybridserve.config.schema import EngineConfig
    from hybridserve.llm import LLM
    from hybridserve.outputs import Logprobs, RequestOutput

FAILED = 1
USAGE_ERROR = 2
INTERRUPTED = 130  # as a shell says of a program that SIGINT ended
BROKEN_PIPE = 141  # and SIGPIPE

SAMPLING_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("min_tokens", int, "tokens before which no text ends"),
    ("n", int, "independent continuations of the prompt"),
    ("temperature", float, "0 takes the most likely token"),
    ("top_k", int, "draw among this many most likely tokens; 0 among all"),
    ("top_p", float, "draw among the most likely tokens that have this probability together"),
    ("min_p", float, "leave out tokens less likely than this share of the most likely one's"),
    ("presence_penalty", float, "against tokens that were generated before"),
    ("frequency_penalty", float, "the same, for each time that they were"),
    ("repetition_penalty", float, "against tokens of prompt and output; 1 is none"),
    (
        "seed",
        int,
        "makes the draws repeatable (of a request; the key `seed` of a YAML file is for all others)",
    ),
    ("logprobs", int, "report each token's log-probability and this many most likely ones (with --prompts)"),
    ("prompt_logprobs", int, "the same for the tokens of the prompt (with --prompts)"),
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its status."""
    arguments = [_with_underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    if sys.stderr is None:  # it was closed, and print() would write to standard output instead
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - it stays open
    if sys.stdout is None:
        _exit(USAGE_ERROR, "standard output is closed")
    try:
        with _interrupt_exits_at_once():
            args = _parse(arguments)
        args.run(args)
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # What is still buffered has no reader; the interpreter must not try to write it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(BROKEN_PIPE)
        _exit(USAGE_ERROR, _one_line(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _exit(status: int, reason: str) -> NoReturn:
    print(f"hybridserve: {reason}", file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def _interrupt_exits_at_once() -> Iterator[None]:
    """For imports, which leave nothing to clean up: an extension module that is interrupted while it is
    loaded makes any other error of KeyboardInterrupt, or none."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, or somebody else's
        yield
        return
    try:
        before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    except ValueError:  # only the main thread may
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _with_underscores(argument: str) -> str:
    """--max-tokens=5 -> --max_tokens=5: both spellings of an option's name work."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="hybridserve", description="A serving engine for hybrid language models.")
    parser.add_argument("--version", action="version", version=f"hybridserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = parser
    for name, (add_options, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name in arguments[:1]:  # the schema of the configuration is read for a command that takes it alone
            add_options(command)
            chosen = command
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in chosen._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {chosen.prog} --help"
        chosen.error(f"unknown argument {unknown[0]!r}; {hint}")
    return args


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("target", metavar="MODEL_OR_YAML", help="directory, hub id, demo, or a YAML file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; the continuation is shown as it comes"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help='a line each: {"prompt": text or list of token ids, and any sampling parameters}',
    )
    parser.add_argument(
        "--out", metavar="FILE.jsonl", type=Path, help="results of --prompts; standard output if not set"
    )
    sampling = parser.add_argument_group("sampling")
    for name, kind, about in SAMPLING_OPTIONS:
        sampling.add_argument(
            f"--{name}", type=kind, default=argparse.SUPPRESS, metavar="N" if kind is int else "X", help=about
        )
    sampling.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="ends the text; may be repeated",
    )
    sampling.add_argument(
        "--stop_token_ids",
        type=int,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="ID",
        help="tokens that end the text",
    )
    sampling.add_argument(
        "--ignore_eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on after an end-of-sequence token",
    )
    _add_config_options(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect)
    parser.add_argument("target", nargs="?", metavar="MODEL_OR_YAML", help="show what it would run with, too")
    parser.add_argument("--models", action="store_true", help="list the supported architectures")
    _add_config_options(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_plan)
    parser.add_argument("target", metavar="MODEL_OR_YAML", help="directory, hub id, demo, or a YAML file")
    parser.add_argument("--json", action="store_true", help="as JSON")
    _add_config_options(parser)


COMMANDS = {
    "generate": (_add_generate, "continue a prompt, or a file of prompts"),
    "inspect": (_add_inspect, "show versions, the machine, and which backends are chosen and why"),
    "plan": (_add_plan, "show what a model needs and how much fits, without loading it"),
}


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    """An option for each key of the configuration: its dotted name, and its last part where that is free."""
    from hybridserve.config.loader import config_keys

    group = parser.add_argument_group("configuration", "Any key of the YAML file; these win over the file.")
    keys = {key: info for key, info in config_keys().items() if not info.is_required()}
    taken = {option for action in parser._actions for option in action.option_strings}
    for key, info in keys.items():
        last = key.rpartition(".")[2]
        names = [f"--{key}"] if last in keys else [f"--{key}", f"--{last}"]
        if free := [name for name in names if name not in taken]:
            default = json.dumps(info.default).strip('"')
            group.add_argument(
                *free,
                dest=f"config:{key}",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=f"{info.description} (default: {default})".replace("%", "%%"),
            )


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM: model or config file, and the keys that were set by options."""
    from hybridserve.config.loader import TextValue

    prefix = "config:"
    options: dict[str, Any] = {
        name.removeprefix(prefix): TextValue(text)
        for name, text in vars(args).items()
        if name.startswith(prefix)
    }
    is_file = args.target.endswith((".yaml", ".yml"))
    return {"config" if is_file else "model": args.target, **options}


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    from hybridserve.config.loader import load_config

    options = _engine_options(args)
    return load_config(options.pop("model", None), options.pop("config", None), options)


def _sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}


def _generate(args: argparse.Namespace) -> None:
    params = SamplingParams(**_sampling_options(args))
    if args.prompts is not None:
        _generate_file(args, params)
        return
    if args.out is not None:
        raise ValueError("--out: is for the results of --prompts")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise ValueError(f"--{name}: is only reported for --prompts")
    with _load(args) as llm:
        llm.check(args.prompt, params)
        print(llm.plan.table(), file=sys.stderr)
        if params.n > 1:
            _generate_several(llm, args.prompt, params)
        else:
            _generate_stream(llm, args.prompt, params)


def _load(args: argparse.Namespace) -> LLM:
    with _interrupt_exits_at_once():
        from hybridserve.llm import LLM

        return LLM(**_engine_options(args))


def _generate_several(llm: LLM, prompt: str, params: SamplingParams) -> None:
    completions = llm.generate(prompt, params)[0].outputs
    for completion in completions:
        print(f"[{completion.index}] {completion.text}")
    aborted = [each for each in completions if each.finish_reason == FinishReason.ABORT]
    if aborted:
        sys.stdout.flush()
        _exit(FAILED, f"[{aborted[0].index}] was aborted: {aborted[0].stop_reason}")


def _generate_stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    shown = sys.stdout.isatty()
    if shown:
        print(prompt, end="", flush=True)
    try:
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
            shown = True
    except RuntimeError as error:  # the engine gave the request up
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


def _generate_file(args: argparse.Namespace, params: SamplingParams) -> None:
    lines = list(_read_prompts(args.prompts, params))
    if args.out is not None:
        folder = _without_links(args.out).parent
        if args.out.is_dir():
            raise ValueError(f"--out: {args.out} is a directory")
        if not args.out.exists() and not folder.is_dir():
            raise ValueError(f"--out: {folder} is not a directory")
    with _load(args) as llm:
        for line in lines:
            try:
                llm.check(line.prompt, line.params)
            except ValueError as error:
                raise ValueError(f"{line.origin}: {error}") from None
        print(llm.plan.table(), file=sys.stderr)
        outputs = llm.generate([line.prompt for line in lines], [line.params for line in lines])
    results = (
        json.dumps(result, ensure_ascii=False) + "\n"
        for line, output in zip(lines, outputs, strict=True)
        for result in _results(line, output)
    )
    if args.out is None:
        sys.stdout.writelines(results)
    else:
        _write(args.out, results)


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


def _read_prompts(path: Path, params: SamplingParams) -> Iterator[_Line]:
    allowed = {field.name for field in fields(SamplingParams)}
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                if not isinstance(line, dict) or "prompt" not in line:
                    raise ValueError('a line is an object with "prompt"')
                prompt = line.pop("prompt")
                if unknown := sorted(line.keys() - allowed):
                    raise ValueError(
                        f"{unknown[0]}: unknown; allowed are prompt, {', '.join(sorted(allowed))}"
                    )
                if "logit_bias" in line:
                    line["logit_bias"] = _with_int_keys(line["logit_bias"])
                yield _Line(f"{path}:{number}", prompt, replace(params, **line))
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
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
        }
        if completion.logprobs is not None:
            result["cumulative_logprob"] = completion.cumulative_logprob
            result["logprobs"] = [_logprobs(position) for position in completion.logprobs]
        if output.prompt_logprobs is not None:
            result["prompt_logprobs"] = [
                position and _logprobs(position) for position in output.prompt_logprobs
            ]
        yield result


def _logprobs(position: Logprobs) -> list[dict[str, Any]]:
    return [{"token_id": token_id, **asdict(logprob)} for token_id, logprob in position.items()]


def _inspect(args: argparse.Namespace) -> None:
    has_settings = any(name.startswith("config:") for name in vars(args))
    if args.models:
        if args.target or has_settings:
            raise ValueError("--models: lists what any model may be; leave out MODEL_OR_YAML and settings")
        from hybridserve.models.registry import ARCHITECTURES

        print("\n".join(sorted(ARCHITECTURES)))
        return
    if args.target is None and has_settings:
        raise ValueError("MODEL_OR_YAML: is needed to see what a setting would do")
    config = None if args.target is None else _engine_config(args)
    with _interrupt_exits_at_once():
        from hybridserve.engine.planner import make_plan
        from hybridserve.models.hub import resolve_model

        rows = list(_machine())
    if config is None:
        rows += _backends()
        print(_table(rows))
    else:
        plan = make_plan(config, resolve_model(config.model))
        print(_table(rows))
        print(plan.table())


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
    from hybridserve.kernels.registry import Capabilities, select

    for operator in OPERATORS:
        choice = select(operator, "auto", Capabilities(device="cpu", dtype="float32"))
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.rejected)
        yield operator, f"{choice.name} ({reasons})" if reasons else choice.name


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _plan(args: argparse.Namespace) -> None:
    config = _engine_config(args)
    with _interrupt_exits_at_once():
        from hybridserve.engine.planner import make_plan
        from hybridserve.models.hub import resolve_model

    plan = make_plan(config, resolve_model(config.model))
    print(json.dumps(plan.to_dict(), indent=2) if args.json else plan.table())
