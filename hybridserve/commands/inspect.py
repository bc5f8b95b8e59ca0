"""`hybridserve inspect`: this machine, a model, a checkpoint or an adapter; a server's cache."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hybridserve import __version__
from hybridserve.bench.options import api_key, is_url
from hybridserve.cli_options import engine_config, engine_options, has_engine_options, typed_options
from hybridserve.commands.table import table
from hybridserve.interrupt import interrupt_exits_at_once

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
ADAPTER = "adapter"
"""What the one that is looked at is called."""


def run(args: argparse.Namespace) -> None:
    """ValueError and OSError for a user's mistake."""
    if args.models:
        if args.target or args.on or args.api_key or has_engine_options(args):
            raise ValueError("--models: lists what any model may be; leave out MODEL_OR_YAML and settings")
        from hybridserve.models.registry import ARCHITECTURES

        print("\n".join(sorted(ARCHITECTURES)))
        return
    if args.target and is_url(args.target):
        _inspect_server(args)
        return
    if args.api_key is not None:
        raise ValueError("--api-key: is for a URL")
    if args.target is None and has_engine_options(args):
        raise ValueError("MODEL_OR_YAML: is needed to see what a setting would do")
    if args.target and _is_adapter(args.target):
        _inspect_adapter(args)
        return
    if args.on is not None:
        raise ValueError(f"--on: {args.target} is no adapter's directory")
    config = None if args.target is None else engine_config(args)
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
        print(table(rows))
        return
    path = resolve_model(config.model)
    print(table(rows))
    is_checkpoint = has_weights(path)
    print(table(checkpoint_rows(config, path) if is_checkpoint else [("checkpoint", "config.json alone")]))
    try:
        print(plan_or_suggest(config, load_hf_config(path)).table(every_reason=True))
    except DoesNotFitError as error:
        if not is_checkpoint:
            raise
        print(f"does not fit  {error}")  # the checkpoint is what was asked for, and it is whole


def _inspect_server(args: argparse.Namespace) -> None:
    if args.on is not None:
        raise ValueError(f"--on: {args.target} is no adapter's directory")
    if names := sorted(typed_options(args)):
        raise ValueError(f"--{names[0]}: is a setting of an engine; the server at {args.target} has its own")
    with interrupt_exits_at_once():
        from hybridserve.commands.inspect_server import inspect_server

    print(inspect_server(args.target, api_key(args)))


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
    print(table(list(describe.layout(path))))
    if model is None:
        return
    with interrupt_exits_at_once():
        from hybridserve.llm import LLM

    del options["model"]
    with LLM(model, **{**options, "lora.adapters": {ADAPTER: str(path)}}) as llm:
        (info,) = llm.list_adapters()
    rows = [("identity", info.identity), ("device", f"{info.device_bytes:,} bytes, rank {info.rank}")]
    print(table([*rows, *describe.report(info.report)]))


def _machine() -> Iterator[tuple[str, str]]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from hybridserve.engine.gpus import find_gpu, why_no_gpu
    from hybridserve.engine.planner import available_memory
    from hybridserve.engine.threads import limit_threads

    yield "hybridserve", __version__
    yield "python", sys.version.split()[0]
    for package in ("torch", "transformers", "safetensors", "tokenizers", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
    gpu = find_gpu()
    if gpu is None:
        yield "device", f"cpu ({why_no_gpu()})"
    else:
        several = f"{gpu.count} x " if gpu.count > 1 else ""
        free, total = (f"{size / 2**30:.1f} GiB" for size in (gpu.free_bytes, gpu.total_bytes))
        yield "device", f"cuda: {several}{gpu.name}, {free} of {total} free"
    yield "cpu", f"{torch.backends.cpu.get_cpu_capability()}, {limit_threads()}"
    yield "memory", f"{available_memory() / 2**30:.1f} GiB available"


def _backends() -> Iterator[tuple[str, str]]:
    from hybridserve.engine.gpus import find_gpu
    from hybridserve.engine.planner import OPERATORS
    from hybridserve.kernels import native
    from hybridserve.kernels.registry import Capabilities, select, sources

    device = "cpu" if find_gpu() is None else "cuda"
    capabilities = Capabilities(device=device, dtype="float32")
    if device == "cpu":
        native.prepare(sources(OPERATORS, capabilities))
    for operator in OPERATORS:
        choice = select(operator, "auto", capabilities)
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.rejected)
        yield operator, f"{choice.name} ({reasons})" if reasons else choice.name
