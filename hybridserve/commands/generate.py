"""`hybridserve generate`: a prompt's continuation as it comes, several, or a file of them.

Knows a terminal; lines of files are for `prompt_file`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hybridserve.cli_options import engine_options, sampling_options
from hybridserve.commands import prompt_file
from hybridserve.commands.failure import CommandFailed
from hybridserve.core.request import FinishReason, SamplingParams
from hybridserve.interrupt import interrupt_exits_at_once

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hybridserve.llm import LLM
    from hybridserve.outputs import RequestOutput


def run(args: argparse.Namespace) -> None:
    """ValueError and OSError for a user's mistake, CommandFailed where text was given up."""
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
    _check_none_aborted(outputs)


def _generate_several(llm: LLM, prompt: str, params: SamplingParams, adapter: str | None) -> None:
    completions = llm.generate(prompt, params, adapter=adapter)[0].outputs
    for completion in completions:
        print(f"[{completion.index}] {completion.text}")
    aborted = [each for each in completions if each.finish_reason == FinishReason.ABORT]
    if aborted:
        sys.stdout.flush()
        raise CommandFailed(f"[{aborted[0].index}] was aborted: {aborted[0].stop_reason}")


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
        raise CommandFailed(str(error)) from error
    print()


def _generate_file(args: argparse.Namespace, params: SamplingParams) -> None:
    if args.compare:
        raise ValueError("--compare: is for one --prompt")
    lines = list(prompt_file.read(args.prompts, params, args.adapter))
    if args.out is not None:
        prompt_file.check_writable(args.out)
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
    prompt_file.write(args.out, lines, outputs)
    _check_none_aborted(outputs)


def _check_none_aborted(outputs: Sequence[RequestOutput]) -> None:
    completions = [completion for output in outputs for completion in output.outputs]
    if aborted := [each for each in completions if each.finish_reason == FinishReason.ABORT]:
        sys.stdout.flush()
        counted = f"{len(aborted)} of {len(completions)} results"
        raise CommandFailed(f"{counted} ended early (finish_reason abort): {aborted[0].stop_reason}")
