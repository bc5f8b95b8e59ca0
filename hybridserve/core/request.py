"""A request from arrival to finish, and the sampling parameters that a user gives it.

Knows token ids and counters; does not know text, tensors or memory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, NamedTuple

from hybridserve.core.structured_outputs import StructuredOutputs

MAX_LOGPROBS = 20
MAX_N = 128
MAX_COUNT = 2**31 - 1
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen. Raises ValueError, naming the field, for a value without sense.

    n: independent continuations of the prompt.
    temperature: 0 is greedy; otherwise logits are divided by it; [0, 1000].
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of tokens whose probabilities sum to at least this; (0, 1].
    min_p: drop tokens less likely than this share of the most likely one's probability; [0, 1].
    presence_penalty, frequency_penalty: subtracted from the logits of tokens already generated, once or per
        occurrence; [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output;
        [0.01, 100].
    logit_bias: token id -> value added to its logit; [-100, 100].
    max_tokens: tokens to generate at most; 0 only with prompt_logprobs, and only once (n = 1).
    min_tokens: tokens before which no end-of-sequence or stop token may be drawn (nor a text end).
    stop: strings that end the text; they are not part of it.
    include_stop_str_in_output: they are, and so is the text of a stop token.
    stop_token_ids: tokens that end the sequence, as the model's own end-of-sequence tokens do.
    ignore_eos: go on after an end-of-sequence token.
    seed: makes the draw repeatable, whatever else is running.
    logprobs: report the log-probability of each generated token and of this many most likely ones.
    prompt_logprobs: the same for the tokens of the prompt.
    structured_outputs: what the text must look like. It ends where nothing may follow, or with an
        end-of-sequence token where that is allowed; min_tokens and ignore_eos put that off only as long as
        something else may follow.
    allowed_token_ids: no other tokens are drawn; not with structured_outputs. They are drawn before
        min_tokens as well if there are no others.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks every value, and makes plain ints and floats of any other whole and real numbers."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", tuple(_sequence("stop", stop, str, "strings")))
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty string would end every text at once")
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._check_allowed()
        for name, least, most in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _whole(name, value, least, most))
        for name, low, high in _REAL_NUMBERS:
            self._set(name, _number(name, getattr(self, name), low, high))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: {_shown(getattr(self, name))} is neither True nor False")
        if self.top_p == 0:
            raise ValueError("top_p: 0 would leave no token to draw; use temperature=0 for greedy")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 asks for nothing; it is only of use with prompt_logprobs")
        if self.max_tokens == 0 and self.n > 1:
            raise ValueError(f"n: {self.n} continuations of no tokens (max_tokens is 0)")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens: {self.min_tokens} is above max_tokens ({self.max_tokens})")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError("logit_bias: must map token ids to numbers")
        biases = {
            _whole("logit_bias", token, 0, MAX_COUNT): _number(
                "logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
            )
            for token, bias in self.logit_bias.items()
        }
        self._set("logit_bias", biases)

    def _check_allowed(self) -> None:
        spec = self.structured_outputs
        if not isinstance(spec, StructuredOutputs | None):
            raise ValueError(f"structured_outputs: {type(spec).__name__} is not StructuredOutputs")
        if spec is not None and self.max_tokens == 0:
            raise ValueError("structured_outputs: max_tokens is 0, so nothing is generated")
        if self.allowed_token_ids is None:
            return
        if spec is not None:
            raise ValueError("allowed_token_ids: structured_outputs says already what may be drawn")
        token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
        if not token_ids:
            raise ValueError("allowed_token_ids: is empty, which leaves no token to draw")
        self._set("allowed_token_ids", tuple(dict.fromkeys(token_ids)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_restricted(self) -> bool:
        """Whether there are tokens that may never, or not now, be drawn."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None

    @property
    def needs_last_token(self) -> bool:
        """Whether a draw depends on the tokens drawn before it by more than the logits."""
        return self.structured_outputs is not None or self.has_penalties


_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
_WHOLE_NUMBERS = (
    ("n", 1, MAX_N),
    ("top_k", -1, MAX_COUNT),
    ("max_tokens", 0, MAX_COUNT),
    ("min_tokens", 0, MAX_COUNT),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_REAL_NUMBERS = (
    ("temperature", 0.0, 1000.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)
"""(field, least, most)."""


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    token_ids = tuple(map(int, _sequence(name, values, Integral, "token ids")))
    if any(token < 0 for token in token_ids):
        raise ValueError(f"{name}: a token id can't be negative")
    return token_ids


def _sequence(name: str, values: Any, kind: type, noun: str) -> Sequence[Any]:
    if not isinstance(values, list | tuple) or any(
        isinstance(v, bool) or not isinstance(v, kind) for v in values
    ):
        raise ValueError(f"{name}: {values!r} is not a list of {noun}")
    return values


def _whole(name: str, value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name}: {_shown(value)} is not a whole number")
    whole = int(value)
    _range(name, whole, least, most)
    return whole


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise ValueError(f"{name}: {_shown(value)} is not a number")
    # a whole number may be too large for a float
    number = int(value) if isinstance(value, Integral) else float(value)
    _range(name, number, least, most)
    return float(number)


def _range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name}: {_shown(value)} is out of range (from {least} to {most})")


def _shown(value: object) -> str:
    """A value in a message; not all digits of a number that has thousands."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a number of more than 20 digits"
    return repr(value)[:100]


class CacheKey(NamedTuple):
    """What the content of a sequence's caches depends on besides its tokens."""

    adapter_id: str | None = None
    """Identity of the adapter's content, never its name: a name may be given other content."""
    adapter_start: int = 0
    """Positions before it were computed by the base model, and are as good as the base model's own."""


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds nothing of the arena: new, swapped out, or preempted and to be computed again
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler and the cache manager change it.

    There are no phases (D5): a sequence has `num_tokens` tokens of which `num_computed` are in the caches; a
    step closes part of the gap. `num_pending` of the tokens were drawn by steps that are still in flight, at
    most one each: they count, but their ids are not known yet.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    adapter: str | None = None
    """The name that it asked for; who shares fairly with whom goes by it."""
    adapter_id: str | None = None
    """Identity of the content that the name had when the request came; None: the base model."""
    adapter_start: int = 0
    """The position from which on the adapter is on."""
    cache_salt: str | None = None
    """Only requests with the same salt share what has been computed."""
    parent_id: str | None = None
    """The request that this one forked from (params.n > 1), and `index` among its continuations."""
    index: int = 0
    ended_children: frozenset[int] = frozenset()
    """Of its continuations, those that ended before their first token was known: if that is drawn again, they
    are not born again."""
    arrival_seq: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    """Tokens of the prompt that had been computed before, for others, when it first began; 0 for those that
    fork."""
    num_pending: int = 0
    num_preemptions: int = 0
    block_ids: tuple[int, ...] = ()
    state_slot: int = 0
    host_block_ids: tuple[int, ...] = ()
    """Of the host's memory, where its blocks are while it is swapped out, and `host_slot` its state."""
    host_slot: int = 0
    write_from: int = 0
    """K and V of tokens before it are in blocks that others share: they are not written again."""
    next_cut: int = 0
    """Where the chunk that gets there has to end, as a checkpoint is due; 0: nowhere."""
    last_step: int = -1
    """The newest step that this sequence was part of; until it has finished, what the sequence holds may be
    written."""
    max_computed: int = 0
    """Tokens that will be computed at most, by the limits on length: the last token drawn never is."""
    order: tuple[int, int, int] = (0, 0, 0)
    """Who goes first: smaller before larger. Unique, and fixed on arrival."""

    @property
    def cache_key(self) -> CacheKey:
        return CacheKey(self.adapter_id, self.adapter_start)

    @property
    def has_started(self) -> bool:
        """Whether it has been computed before, by itself or by the request that it forked from."""
        return self.num_preemptions > 0 or self.parent_id is not None

    @property
    def has_memory(self) -> bool:
        """Of the arena."""
        return self.state_slot > 0 or self.block_ids != ()

    @property
    def is_swapped_out(self) -> bool:
        """What it has computed is in the host's memory."""
        return self.host_slot > 0 or self.host_block_ids != ()

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_known(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids) + self.num_pending

    @property
    def num_runnable(self) -> int:
        """Tokens that could be computed now."""
        num_tokens = (
            len(self.prompt_ids) + len(self.output_ids) + self.num_pending
        )  # inline: this is a hot path
        if self.num_pending and self.params.needs_last_token:
            return 0  # a draw looks at the tokens before it, and one of them is not known yet
        return (num_tokens if num_tokens < self.max_computed else self.max_computed) - self.num_computed

    @property
    def child_ids(self) -> list[str]:
        """The ids of the continuations that fork from this request after its prompt (params.n > 1)."""
        count = self.params.n if self.parent_id is None else 1
        return [f"{self.id}#{index}" for index in range(1, count)]

    def children(self) -> list[Request]:
        """The continuations that fork from this request, while a step is drawing their first token."""
        return [
            Request(
                id=child_id,
                prompt_ids=self.prompt_ids,
                params=self.params,
                priority=self.priority,
                adapter=self.adapter,
                adapter_id=self.adapter_id,
                adapter_start=self.adapter_start,
                cache_salt=self.cache_salt,
                parent_id=self.id,
                index=index,
                arrival_seq=self.arrival_seq,
                num_pending=1,
                max_computed=self.max_computed,
                order=(*self.order[:2], index),
            )
            for index, child_id in enumerate(self.child_ids, start=1)
            if index not in self.ended_children
        ]

    def token_ids(self, start: int, end: int) -> list[int]:
        """The known ids of positions start .. end."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:] + self.output_ids[: end - num_prompt]
