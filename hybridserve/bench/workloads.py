"""What is sent: seeded requests of known lengths, as token ids, as words, or as the messages of a chat.

| | prompts | output tokens |
|---|---|---|
| W1 | one of 64 tokens | 128 |
| W2 | 16 at once, 32 to 256 tokens | 16 to 128 |
| W3 | one of 2,048 tokens | 1 |
| W4 | 32 at once, 512 shared tokens and 16 of their own | 16 |
| sharegpt | lengths log-normal about the means of a public record of chats | the same |
| INxOUT | IN tokens | OUT |

W1 to W4 are those of `benchmarks/`: the same ids for the same seed, for any vocabulary of at least 8,192.
Knows lengths and seeds; not when anything is sent.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from hybridserve.bench.target import is_chat, joined
from hybridserve.config.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hybridserve.bench.target import Content, Message

Form = Literal["ids", "text", "chat"]

BOS = 1
FIRST_ID = 300
"""Below it stand special tokens and single bytes, in many vocabularies."""
END_ID = 8192
"""Ids are below it, however large a vocabulary is, so that prompts are the same for all."""

MEAN_PROMPT, MEAN_OUTPUT = 161, 338
"""Tokens: the means that the paper on PagedAttention (arXiv 2309.06180, figure 11) gives for ShareGPT."""
SIGMA_PROMPT, SIGMA_OUTPUT = 1.2, 0.9
"""Of the logarithms: our choice; medians are 78 and 225 tokens."""
LEAST_TOKENS, MOST_TOKENS = 4, 2048

_TEXT = (
    "the of and to in is was that it for on with as he at by from his they this have not are but had "
    "she or we an there her were one do been all their has would what will if can when so no said who "
    "more about up them some could him into its then two out time like only my did other me your now "
    "over just may these new also people any first very know see get made down after way many must"
)
WORDS = tuple(_TEXT.split())
"""One token each in most vocabularies."""


class Turn(NamedTuple):
    """What is new in a prompt, and the tokens that are asked for."""

    content: Content
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another: the prompt of each holds all that was said before."""

    turns: tuple[Turn, ...]
    adapter: str | None = None
    ignore_eos: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """name: for the report. conversations: without end, the same each time. num_requests: that are sent where
    nobody says how many. concurrency: the same for a closed loop."""

    name: str
    conversations: Callable[[], Iterator[Conversation]]
    num_requests: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """How synthetic requests are made. limit: tokens that prompt and answer may have; None is no limit."""

    seed: int = 0
    form: Form = "ids"
    vocab_size: int | None = None
    limit: int | None = None
    num_turns: int = 1
    temperature: float = 0.0

    def conversation(self, *turns: Turn) -> Conversation:
        return Conversation(turns, sampling={"temperature": self.temperature})

    def contents(self, rng: random.Random, num_tokens: int, *, is_first: bool) -> Content:
        """About so many tokens; exactly so many ids."""
        if self.form == "ids":
            return _prompt(rng, num_tokens, self._end) if is_first else _ids(rng, num_tokens, self._end)
        words = " ".join(rng.choice(WORDS) for _ in range(num_tokens))
        if self.form == "chat":
            return _said(words)
        return words if is_first else f" {words}"

    @property
    def _end(self) -> int:
        return END_ID if self.vocab_size is None else min(END_ID, self.vocab_size)


def make_workload(spec: str, drawing: Drawing) -> Workload:
    """The workload that a word names. Raises ValueError."""
    if match := re.fullmatch(r"(\d+)x(\d+)", spec):
        sizes = int(match[1]), int(match[2])
        if min(sizes) < 1:
            raise ValueError(f"--workload: {spec}: both numbers must be at least 1")
        _check_fits(spec, drawing, sum(sizes) * drawing.num_turns)
        return Workload(spec, partial(_drawn, drawing, lambda *_: sizes), 64, 8)
    if spec == "sharegpt":
        return Workload(spec, partial(_drawn, drawing, _sharegpt_sizes), 64, 8)
    if spec in _FIXED:
        if drawing.num_turns > 1:
            raise ValueError("--turns: is for sharegpt and INxOUT")
        make, num_requests, longest = _FIXED[spec]
        _check_fits(spec, drawing, longest)
        return Workload(spec, partial(_repeated, drawing, make), num_requests, num_requests)
    near = nearest(spec, [*_FIXED, "sharegpt"])
    hint = f"did you mean {near}?" if near else f"there is {', '.join(_FIXED)}, sharegpt, INxOUT and *.jsonl"
    raise ValueError(f"--workload: {spec!r} is unknown; {hint}")


def _check_fits(spec: str, drawing: Drawing, num_tokens: int) -> None:
    if drawing.form == "ids" and drawing.limit is not None and num_tokens > drawing.limit:
        raise ValueError(
            f"--workload: {spec} has requests of {num_tokens} tokens in all, max_model_len is {drawing.limit}"
        )


def _repeated(drawing: Drawing, make: Callable[[Drawing, int], list[Turn]]) -> Iterator[Conversation]:
    for repeat in itertools.count(drawing.seed):
        yield from map(drawing.conversation, make(drawing, repeat))


def _drawn(
    drawing: Drawing, sizes: Callable[[random.Random, Drawing], tuple[int, int]]
) -> Iterator[Conversation]:
    for number in itertools.count():
        rng = random.Random(f"{drawing.seed} {number}")
        turns = []
        for turn in range(drawing.num_turns):
            num_prompt, num_output = sizes(rng, drawing)
            turns.append(Turn(drawing.contents(rng, num_prompt, is_first=turn == 0), num_output))
        yield drawing.conversation(*turns)


def _sharegpt_sizes(rng: random.Random, drawing: Drawing) -> tuple[int, int]:
    """Of one turn, whose share of the limit is an equal one."""
    most = MOST_TOKENS if drawing.limit is None else min(MOST_TOKENS, drawing.limit // drawing.num_turns // 2)
    return (
        _lognormal(rng, MEAN_PROMPT, SIGMA_PROMPT, most),
        _lognormal(rng, MEAN_OUTPUT, SIGMA_OUTPUT, most),
    )


def _lognormal(rng: random.Random, mean: float, sigma: float, most: int) -> int:
    drawn = round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
    return max(1, min(most, max(LEAST_TOKENS, drawn)))


# ---- W1 to W4. In the form of ids they are, id by id, those of benchmarks/workloads.py.


def _ids(rng: random.Random, count: int, end: int) -> list[int]:
    first = min(FIRST_ID, end // 2)
    return [rng.randrange(first, end) for _ in range(count)]


def _prompt(rng: random.Random, count: int, end: int) -> list[int]:
    return [BOS, *_ids(rng, count - 1, end)]


def _w1(drawing: Drawing, repeat: int) -> list[Turn]:
    return [Turn(drawing.contents(random.Random(1000 + repeat), 64, is_first=True), 128)]


def _w2(drawing: Drawing, repeat: int) -> list[Turn]:
    lengths = random.Random(7)  # the same in every repeat; the tokens are not
    sizes = [(lengths.randint(32, 256), lengths.randint(16, 128)) for _ in range(16)]
    rng = random.Random(2000 + repeat)
    return [Turn(drawing.contents(rng, prompt, is_first=True), output) for prompt, output in sizes]


def _w3(drawing: Drawing, repeat: int) -> list[Turn]:
    return [Turn(drawing.contents(random.Random(3000 + repeat), 2048, is_first=True), 1)]


def _w4(drawing: Drawing, repeat: int) -> list[Turn]:
    rng = random.Random(4000 + repeat)
    shared = drawing.contents(rng, 512, is_first=True)
    own = [drawing.contents(rng, 16, is_first=False) for _ in range(32)]
    if is_chat(shared):  # one message, not two
        return [Turn(_said(f"{shared[0]['content']} {cast('Any', each)[0]['content']}"), 16) for each in own]
    return [Turn(joined(shared, each), 16) for each in own]


def _said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


_FIXED = {"W1": (_w1, 1, 192), "W2": (_w2, 16, 384), "W3": (_w3, 1, 2049), "W4": (_w4, 32, 544)}
"""name -> (one repeat of it, its number of requests, tokens of the longest)."""


# ---- how many, and with which adapters


def take(conversations: Iterable[Conversation], num_requests: int) -> Iterator[Conversation]:
    """Conversations of so many turns in all; the last may be cut short."""
    left = num_requests
    for conversation in conversations:
        if left <= 0:
            return
        yield replace(conversation, turns=conversation.turns[:left])
        left -= len(conversation.turns)


def with_adapters(
    conversations: Iterable[Conversation], names: list[str | None], exponent: float, seed: int
) -> Iterator[Conversation]:
    """Each conversation with one of the adapters (None is the base model), drawn with weights 1 / rank **
    exponent in the order of the names: 0 is uniform, 1 is Zipf's law."""
    rng = random.Random(f"adapters {seed}")
    weights = [1 / rank**exponent for rank in range(1, len(names) + 1)]
    for conversation in conversations:
        yield replace(conversation, adapter=rng.choices(names, weights)[0])
