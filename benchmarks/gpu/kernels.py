"""Time of every kernel at the widths of real models, beside the time that its bytes or operations take at
the rates that this device was just seen to reach.

A kernel is checked against the reference at the same widths before it is timed: what is wrong has no speed.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu import cases, rates, weighted_cases
from benchmarks.gpu.checks import assert_same, backend_of
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.records import Recorder, device_of, part_arguments, read, start_again_if_lost
from benchmarks.gpu.shapes import Shape, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.cases import Case

DECODES = (1, 64, 256)
"""Sequences of a step with one token each."""

CONTEXT = 4096

PROMPT = 4096

LEAST_SECONDS = 3.0
"""That a case may take, with compiling."""

BAMBA_HEADS = (128, 64, 1, 128)
"""Of bamba-9b: heads, channels, groups, states."""

Make = tuple["Callable[[bool], Case]", str]
"""Makes a case: the one to time or, given True, one of the same widths that the reference can do; and its
format of weights."""


def main() -> int:
    arguments = part_arguments(__doc__).parse_args()
    recorder = Recorder(arguments.records, arguments.seconds)
    device = device_of(arguments.dry)
    if arguments.dry:
        from tests.harness.triton_interpreter import require_triton

        require_triton()
    clock = Clock(device)
    with torch.inference_mode():
        measured = rates.load(arguments.work) if arguments.again else None
        if measured is None:
            with recorder.piece("rates", 0) as found:
                assert found is not None
                measured = rates.measure(clock)
                rates.save(measured, arguments.work)
                found |= measured
        if measured is None:
            return recorder.exit_status()
        before = {record.get("number") for record in read(arguments.records)} if arguments.again else set()
        models = shapes(dry=arguments.dry)
        every = (each for shape in models for each in all_cases(shape, device, dry=arguments.dry))
        for number, (make, weights) in enumerate(every):
            if number not in before:
                time_case(recorder, clock, measured, make, weights, number)
    return 1 if arguments.again else recorder.exit_status()


def time_case(
    recorder: Recorder,
    clock: Clock,
    measured: rates.Rates,
    make: Callable[[bool], Case],
    weights: str,
    number: int,
) -> None:
    keywords, num_failures = getattr(make, "keywords", {}), recorder.num_failures
    with recorder.piece("kernel", LEAST_SECONDS, name=keywords.get("name", ""), number=number) as found:
        if found is None:
            return
        small = make(True)
        backend = backend_of(small.operator)
        assert_same(small, backend, backend_of(small.operator, "reference"), torch.bfloat16, weights)
        del small
        case = make(False)
        found |= {"operator": case.operator, "shape": case.shape, "weights": weights}
        found |= {"num_bytes": case.num_bytes, "num_ops": case.num_ops, "arithmetic": case.arithmetic}
        found["floor_us"] = 1e6 * rates.floor(case.num_bytes, case.num_ops, case.arithmetic, measured)
        bound = case.bind(backend)
        found["eager_us"] = 1e6 * clock.eager(bound.call)
        found["us"] = 1e6 * clock.captured(bound.call)
    if recorder.num_failures > num_failures:
        start_again_if_lost(recorder)
    if clock.device.type == "cuda":
        torch.cuda.empty_cache()


def all_cases(shape: Shape, device: str, *, dry: bool) -> Iterator[Make]:
    decodes, context, prompt = ((2,), 20, 5) if dry else (DECODES, CONTEXT, PROMPT)
    num_rows = decodes if dry else (*DECODES, PROMPT)
    yield from attention_cases(shape, device, decodes, context, prompt)
    yield from recurrent_cases(shape, device, decodes, prompt, dry=dry)
    yield from projection_cases(shape, device, num_rows)
    if shape.experts > 1:
        yield from expert_cases(shape, device, num_rows)
    yield from adapter_cases(shape, device, decodes)
    yield from row_cases(shape, device, num_rows[-2:])


def attention_cases(
    shape: Shape, device: str, decodes: tuple[int, ...], context: int, prompt: int
) -> Iterator[Make]:
    batches = {f"attention, decode {n} x {context}": [(context, 1)] * n for n in decodes}
    batches[f"attention, prompt of {prompt}"] = [(0, prompt)]
    batches[f"attention, chunk of {prompt // 4} after {context}"] = [(context, prompt // 4)]
    for name, lengths in batches.items():
        few = [(min(before, 37), min(rows, 5)) for before, rows in lengths[:2]]

        def make(small: bool, name: str, lengths: cases.Lengths, few: cases.Lengths) -> Case:
            return cases.attention(shape, few if small else lengths, torch.bfloat16, device, name=name)

        yield partial(make, name=name, lengths=lengths, few=few), "none"


def recurrent_cases(
    shape: Shape, device: str, decodes: tuple[int, ...], prompt: int, *, dry: bool
) -> Iterator[Make]:
    batches = {f"decode {n}": [1] * n for n in decodes}
    batches |= {f"prompt of {prompt}": [prompt], f"prompts 4 x {prompt // 4}": [prompt // 4] * 4}
    heads, model = ((2, 8, 1, 16), "tiny") if dry else (BAMBA_HEADS, "bamba-9b")
    for batch, lens in batches.items():
        few = [min(length, 5) for length in lens[:2]]

        def make(small: bool, name: str, lens: list[int], few: list[int]) -> Case:
            operator = {"convolution": cases.convolution, "scan": cases.scan}[name.partition(",")[0]]
            return operator(shape, few if small else lens, torch.bfloat16, device, name=name)

        def make_ssd(small: bool, name: str, lens: list[int], few: list[int]) -> Case:
            some = few if small else lens
            return cases.ssd(heads, some, torch.bfloat16, device, name=name, shape=model)

        for name in ("convolution", "scan"):
            yield partial(make, name=f"{name}, {batch}", lens=lens, few=few), "none"
        if shape.name in ("jamba-3b", "tiny"):  # one of them: this one's sizes are its own
            yield partial(make_ssd, name=f"Mamba-2 scan, {batch}", lens=lens, few=few), "none"


def projection_cases(shape: Shape, device: str, num_rows: tuple[int, ...]) -> Iterator[Make]:
    for weights in weighted_cases.FORMATS:
        for projection in ("in_proj", "down_proj"):
            size = weighted_cases.projections(shape)[projection]
            for rows in num_rows:

                def make(small: bool, name: str, size: tuple[int, int], rows: int, weights: str) -> Case:
                    return weighted_cases.linear(
                        *(shape.name, size, min(rows, 3) if small else rows, weights),
                        *(torch.bfloat16, device),
                        name=name,
                    )

                name = f"{projection} {weights}, {rows} rows"
                yield partial(make, name=name, size=size, rows=rows, weights=weights), weights


def expert_cases(shape: Shape, device: str, num_rows: tuple[int, ...]) -> Iterator[Make]:
    for weights in weighted_cases.FORMATS:
        for rows in num_rows:

            def make(small: bool, name: str, rows: int, weights: str) -> Case:
                some = min(rows, 3) if small else rows
                return weighted_cases.experts(shape, some, weights, torch.bfloat16, device, name=name)

            yield partial(make, name=f"experts {weights}, {rows} rows", rows=rows, weights=weights), weights
    for rows in num_rows:

        def make_route(small: bool, name: str, rows: int) -> Case:
            some = min(rows, 3) if small else rows
            return weighted_cases.route(shape, some, torch.bfloat16, device, name=name, renormalize=False)

        yield partial(make_route, name=f"routing, {rows} rows", rows=rows), "none"


def adapter_cases(shape: Shape, device: str, decodes: tuple[int, ...]) -> Iterator[Make]:
    for rows in decodes:

        def make(small: bool, name: str, rows: int) -> Case:
            some = min(rows, 9) if small else rows
            return weighted_cases.adapters(shape, some, 8, torch.bfloat16, device, name=name)

        yield partial(make, name=f"8 adapters of qkv_proj, {rows} rows", rows=rows), "none"


def row_cases(shape: Shape, device: str, num_rows: tuple[int, ...]) -> Iterator[Make]:
    dtype, hidden = torch.bfloat16, shape.hidden
    parts = (shape.dt_rank, shape.states, shape.states)
    for rows in num_rows:
        makes: dict[str, Callable[[int, str], Case]] = {
            "norm": lambda n, name: cases.rms_norm((hidden,), n, dtype, device, name=name, shape=shape.name),
            "norm of dt, B, C": lambda n, name: cases.rms_norm(
                parts, n, dtype, device, name=name, shape=shape.name
            ),
            "norm of a sum": lambda n, name: cases.add_rms_norm(shape, n, dtype, device, name=name),
            "silu and product": lambda n, name: cases.silu_and_mul(shape, n, dtype, device, name=name),
            "rotation": lambda n, name: cases.rotate(shape, n, dtype, device, name=name),
        }
        if rows == num_rows[0]:  # those that draw a token
            makes["top k"] = lambda n, name: cases.keep_top_k(shape, n, device, name=name)
            makes["top p"] = lambda n, name: cases.keep_top_p(shape, n, device, name=name)
        for operator, of_rows in makes.items():

            def make(small: bool, name: str, rows: int, of_rows: Callable[[int, str], Case]) -> Case:
                return of_rows(min(rows, 5) if small else rows, name)

            yield partial(make, name=f"{operator}, {rows} rows", rows=rows, of_rows=of_rows), "none"


if __name__ == "__main__":
    sys.exit(main())
