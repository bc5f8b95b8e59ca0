"""The arguments of `hybridserve bench`. Knows names, types and help texts alone."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

KEY_VARIABLE = "HYBRIDSERVE_API_KEY"


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    add_target_options(parser)
    sent = parser.add_argument_group("what is sent")
    sent.add_argument(
        "--workload",
        metavar="NAME",
        default="W2",
        help="W1, W2, W3, W4, sharegpt, INxOUT (such as 512x64) or FILE.jsonl (default: W2)",
    )
    sent.add_argument(
        "--send",
        choices=("ids", "text", "chat"),
        help="a synthetic prompt as token ids, as words, or as a chat of words (default: ids)",
    )
    sent.add_argument("--num_requests", type=count, metavar="N", help="default: once the workload, or 64")
    sent.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts, lengths and arrivals")
    sent.add_argument(
        "--turns",
        type=count,
        default=1,
        metavar="N",
        help="turns of a conversation; each holds what was said before",
    )
    sent.add_argument(
        "--think", type=seconds, default=0.0, metavar="SECONDS", help="between an answer and the next turn"
    )
    sent.add_argument(
        "--adapters", metavar="A,B,C", help="each conversation with one of them; base is the base model"
    )
    sent.add_argument(
        "--adapter_mix",
        metavar="MIX",
        default="uniform",
        help="how often each adapter: uniform, zipf (the first one most often) or zipf:EXPONENT",
    )
    sent.add_argument("--temperature", type=float, metavar="X", help="default: 0")
    sent.add_argument(
        "--vocab_size", type=count, metavar="N", help="ids are below it; needed where a server doesn't tell"
    )
    load = parser.add_argument_group("when it is sent")
    load.add_argument(
        "--concurrency", type=count, metavar="N", help="closed loop: so many at any time (the default load)"
    )
    load.add_argument(
        "--rate", type=positive, metavar="R", help="open loop: so many a second, whatever comes back"
    )
    load.add_argument(
        "--arrivals", choices=("poisson", "constant"), help="of an open loop (default: poisson)"
    )
    load.add_argument("--duration", type=positive, metavar="SECONDS", help="after it nothing more is sent")
    load.add_argument(
        "--warmup",
        type=whole,
        default=1,
        metavar="N",
        help="requests before it that don't count (default: 1)",
    )
    load.add_argument(
        "--timeout", type=positive, default=600.0, metavar="SECONDS", help="for each request (default: 600)"
    )
    told = parser.add_argument_group("what is told")
    told.add_argument(
        "--slo", metavar="BOUNDS", help="also count requests that meet them: ttft=500ms,itl=50ms,e2e=10s"
    )
    told.add_argument("--json", metavar="FILE", type=Path, help="all numbers, and those of each request")
    told.add_argument("--plot", metavar="FILE.png", type=Path, help="a picture (needs the extra plot)")


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """Those that `bench` and `chat` share."""
    parser.add_argument(
        "target",
        metavar="MODEL_OR_YAML_OR_URL",
        help="directory, hub id, demo, a YAML file, or the URL of any OpenAI-compatible server",
    )
    remote = parser.add_argument_group("a server")
    remote.add_argument("--model", metavar="NAME", help="default: the first one that it lists")
    add_key_option(remote)


def add_key_option(parser: argparse._ActionsContainer) -> None:
    """Of the commands that ask a server."""
    parser.add_argument(
        "--api_key", metavar="KEY", help=f"of a server; default: the environment's {KEY_VARIABLE}"
    )


def api_key(args: argparse.Namespace) -> str | None:
    """What was typed, or else what the environment has."""
    key: str | None = args.api_key
    return key or os.environ.get(KEY_VARIABLE) or None


def is_url(target: str) -> bool:
    return "://" in target


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def whole(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def seconds(text: str) -> float:
    if not 0 <= (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no time")
    return number
