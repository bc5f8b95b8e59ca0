"""What may be typed: the commands, their arguments, and an option for each key of the configuration.

Knows names, types and help texts, and turns what was typed into keyword arguments; does not know what a
command does. Brings no schema of the configuration, whose keys are listed in a file: `--help` is quick.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hybridserve import __version__
from hybridserve.config.keys import known_keys
from hybridserve.config.spelling import nearest
from hybridserve.core.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hybridserve.config.schema import EngineConfig

USAGE_ERROR = 2
CONFIG = "config:"  # before the names of arguments that are keys of the configuration

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

_SubParsers = argparse._SubParsersAction

NOT_OF_A_CHAT = ("n", "logprobs", "prompt_logprobs")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command, its arguments and what was set by options. Exits after --help, a mistake, or the answer
    to a shell that completes a line."""
    arguments = [_with_underscores(argument) for argument in arguments]
    if is_completing := "_ARGCOMPLETE" in os.environ:
        from hybridserve.completion import answer, words

        arguments = words()
    parser = _Parser(prog="hybridserve", description="A serving engine for hybrid language models.")
    parser.add_argument("--version", action="version", version=f"hybridserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (add_options, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name in arguments[:1]:  # hundreds of options, for one command alone
            add_options(command)
    chosen = _chosen(parser, arguments)
    if is_completing:
        answer(parser, chosen, {CONFIG + key.name: key.choices for key in known_keys().values()})
    _check_options(chosen, arguments)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.error(f"unknown argument {unknown[0]!r}; see {chosen.prog} --help")
    return args


def _check_options(chosen: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Says which option does not exist, before argparse says that the one that was meant is missing."""
    names = [name[2:] for action in chosen._actions for name in action.option_strings if name[:2] == "--"]
    for argument in itertools.takewhile(lambda each: each != "--", arguments):
        name = argument[2:].partition("=")[0]
        if argument.startswith("--") and " " not in name and name not in {*names, "help", "version"}:
            near = nearest(name, names)
            hint = f"did you mean --{near}?" if near else f"see {chosen.prog} --help"
            chosen.error(f"unknown argument {argument!r}; {hint}")


def _chosen(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the command, or of the command's command, that the first words name."""
    for word in arguments[:2]:
        choices = [action.choices for action in parser._actions if isinstance(action, _SubParsers)]
        if not choices or word not in (choices[0] or {}):
            break
        parser = choices[0][word]
    return parser


def _add_verbose(parser: argparse.ArgumentParser, about: str = "show tracebacks") -> None:
    parser.add_argument("--verbose", action="store_true", help=about)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL_OR_YAML", help="directory, hub id, demo, or a YAML file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", help="text to continue; the continuation is shown as it comes"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        type=Path,
        help='a line each: {"prompt": text or list of token ids, any sampling parameters, "adapter"}',
    )
    parser.add_argument(
        "--out", metavar="FILE.jsonl", type=Path, help="results of --prompts; standard output if not set"
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME",
        help="continue with this adapter (see lora.adapters), not the base model",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="continue --prompt with the base model and with every adapter, in one batch, side by side",
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
    _add_verbose(parser)
    _add_config_options(parser)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL_OR_YAML", help="directory, hub id, demo, or a YAML file")
    parser.add_argument(
        "--api_key",
        action="append",
        metavar="KEY",
        help="a key of users; may be repeated, and replaces server.api_keys (others on this machine can see "
        "what was typed: a file with ${NAME} of the environment hides it)",
    )
    parser.add_argument(
        "--insecure",
        dest=CONFIG + "server.insecure",
        action="store_const",
        const="true",
        default=argparse.SUPPRESS,
        help="listen beyond this machine though there is no key",
    )
    parser.add_argument(
        "--log_format", choices=("text", "json"), default="text", help="of the log on standard error"
    )
    _add_verbose(parser, "log every request, and tracebacks")
    _add_config_options(parser)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    from hybridserve.bench.options import add_key_option

    parser.add_argument(
        "target",
        nargs="?",
        metavar="MODEL_OR_YAML_OR_CHECKPOINT_OR_ADAPTER_OR_URL",
        help="show what a model would run with, too, and where its checkpoint's tensors go; what an "
        "adapter's directory holds; or how the prefix cache of the server at a URL does, and why no better",
    )
    add_key_option(parser)
    parser.add_argument(
        "--on", metavar="MODEL", help="report what of the adapter would be applied to this model"
    )
    parser.add_argument("--models", action="store_true", help="list the supported architectures")
    _add_verbose(parser)
    _add_config_options(parser)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="MODEL_OR_YAML", help="directory, hub id, demo, or a YAML file")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        type=Path,
        help="draw memory by part and projected throughput, too (needs the extra plot)",
    )
    _add_verbose(parser)
    _add_config_options(parser)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="directory, hub id, or demo")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="a directory that is not there, or empty")
    parser.add_argument("--format", metavar="NAME", required=True, help="int8, int8-w8a8 or fp8")
    parser.add_argument(
        "--targets",
        metavar="LIST",
        help="experts, mlp, all (the default), names of modules, re: and a pattern; with commas between",
    )
    _add_verbose(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    from hybridserve.bench.options import add_target_options

    add_target_options(parser)
    parser.add_argument("--adapter", metavar="NAME", help="answer with this adapter, not the base model")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    sampling = parser.add_argument_group("sampling")
    for name, kind, about in SAMPLING_OPTIONS:
        if name not in NOT_OF_A_CHAT:
            sampling.add_argument(
                f"--{name}",
                type=kind,
                default=argparse.SUPPRESS,
                metavar="N" if kind is int else "X",
                help=about,
            )
    _add_verbose(parser)
    _add_config_options(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from hybridserve.bench.options import add_bench_options

    add_bench_options(parser)
    _add_verbose(parser)
    _add_config_options(parser)


def _add_config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="say what is wrong in a file, all of it")
    show = actions.add_parser("show", help="show settings as YAML, each with its origin")
    for action in (check, show):
        action.add_argument("file", metavar="FILE.yaml", type=Path)
        _add_verbose(action)
    show.add_argument(
        "--effective", action="store_true", help="every key that there is, not only those that were set"
    )
    for action in (check, show):
        _add_config_options(action)


def _add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    _add_verbose(parser)


COMMANDS = {
    "bench": (_add_bench, "measure throughput and latency of a model or of any OpenAI-compatible server"),
    "chat": (_add_chat, "talk with a model, or with one that a server has, in the terminal"),
    "completion": (_add_completion, "print what makes a shell complete the arguments of hybridserve"),
    "config": (_add_config, "check a YAML file, or show every setting and where it comes from"),
    "serve": (_add_serve, "serve a model over HTTP, to clients of OpenAI's API"),
    "generate": (_add_generate, "continue a prompt, or a file of prompts"),
    "inspect": (_add_inspect, "show the machine and which backends are chosen; a model, adapter or server"),
    "plan": (_add_plan, "show what a model needs and how much fits, without loading it"),
    "quantize": (_add_quantize, "write a model with quantized weights into another directory"),
}


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    """An option for each key of the configuration: its dotted name, and its last part where that is free."""
    group = parser.add_argument_group("configuration", "Any key of the YAML file; these win over the file.")
    keys = known_keys()
    sections = {key.partition(".")[0] for key in keys if "." in key}
    taken = {option for action in parser._actions for option in action.option_strings}
    for key, info in keys.items():
        last = key.rpartition(".")[2]
        is_free = last not in keys and last not in sections
        names = [f"--{key}", f"--{last}"] if is_free else [f"--{key}"]
        if free := [name for name in names if name not in taken]:
            default = json.dumps(info.default).strip('"')
            group.add_argument(
                *free,
                dest=CONFIG + key,
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=f"{info.about} (default: {default})".replace("%", "%%"),
            )


def typed_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keys that were set by options."""
    from hybridserve.config.settings import TextValue

    typed = {name.removeprefix(CONFIG): text for name, text in vars(args).items() if name.startswith(CONFIG)}
    return {name: TextValue(text) for name, text in typed.items()}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of LLM: model or config file, and the keys that were set by options."""
    is_file = args.target.lower().endswith((".yaml", ".yml"))
    return {"config" if is_file else "model": args.target, **typed_options(args)}


def engine_config(args: argparse.Namespace, **more: object) -> EngineConfig:
    """What the model or file and the options mean; `more` wins over them."""
    from hybridserve.config.loader import load_config

    options = {**engine_options(args), **more}
    model, file = options.pop("model", None), options.pop("config", None)
    return load_config(model, file, options, with_keys=args.command == "serve")


def has_engine_options(args: argparse.Namespace) -> bool:
    """Whether a key of the configuration was set by an option."""
    return any(name.startswith(CONFIG) for name in vars(args))


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of SamplingParams that were set by options."""
    return {f.name: getattr(args, f.name) for f in fields(SamplingParams) if hasattr(args, f.name)}


def _with_underscores(argument: str) -> str:
    """--max-tokens=5 -> --max_tokens=5: both spellings of an option's name work."""
    name, equals, value = argument[2:].partition("=")
    if not argument.startswith("--") or " " in name:  # with a space it is a value, to argparse as well
        return argument
    return f"--{name.replace('-', '_')}{equals}{value}"
