"""A file of prompts, a line each, and the file of their results. Knows JSON and files; runs nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridserve.core.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hybridserve.outputs import Logprobs, RequestOutput


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file of prompts, and where it stands."""

    origin: str
    prompt: str | list[int]
    params: SamplingParams
    adapter: str | None


def read(path: Path, params: SamplingParams, adapter: str | None) -> Iterator[Line]:
    """`params` and `adapter` are for lines that say nothing else. ValueError with the line's number."""
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
                yield Line(f"{path}:{number}", prompt, replace(params, **line), named)
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


def check_writable(out: Path) -> None:
    """ValueError for what no results can be written to."""
    folder = _without_links(out).parent
    if out.is_dir():
        raise ValueError(f"--out: {out} is a directory")
    if not out.exists() and not folder.is_dir():
        raise ValueError(f"--out: {folder} is not a directory")


def write(out: Path | None, lines: Sequence[Line], outputs: Sequence[RequestOutput]) -> None:
    """The results, a line for each continuation, to a file or to standard output."""
    results = (
        json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n"
        for line, output in zip(lines, outputs, strict=True)
        for result in _results(line, output)
    )
    if out is None:
        sys.stdout.writelines(results)
    else:
        _write(out, results)


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


def _results(line: Line, output: RequestOutput) -> Iterator[dict[str, Any]]:
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
