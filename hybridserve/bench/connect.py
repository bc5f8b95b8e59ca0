"""The target that a command line names: a server's URL, or an engine of this program.

Knows arguments and a terminal; what is asked of a target is not its business.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hybridserve.bench.http_target import HttpTarget
from hybridserve.bench.options import api_key, is_url

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hybridserve.bench.target import Target

PHASES = {
    "process": "starting the engine's process",
    "import": "importing",
    "tokenizer": "reading the tokenizer",
    "plan": "planning",
    "load": "loading the weights",
}


def make_target(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> Target:
    """The server at a URL, or an engine of the configuration. Raises ValueError."""
    if is_url(args.target):
        keys = sorted(engine_options.keys() - {"model", "config"})
        if keys:
            raise ValueError(
                f"--{keys[0]}: is a setting of an engine; the server at {args.target} has its own"
            )
        return HttpTarget(args.target, model=args.model, api_key=api_key(args))
    for name in ("model", "api_key"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: is for a URL")
    from hybridserve.bench.engine_target import EngineTarget
    from hybridserve.frontend.async_engine import AsyncLLM

    return EngineTarget(AsyncLLM(**engine_options), _show_phase)


def _show_phase(name: str, seconds: float | None) -> None:
    if sys.stderr.isatty():
        shown = "" if seconds is not None else f"{PHASES.get(name, name)} ..."
        sys.stderr.write(f"\r\x1b[K{shown}")
        sys.stderr.flush()
