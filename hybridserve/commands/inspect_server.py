"""`hybridserve inspect URL`: how a server's prefix cache does, and why it does no better, in words.

Knows the names of `/metrics` and what they mean; runs no engine and imports no torch.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from hybridserve.bench.http_client import HttpFailure
from hybridserve.bench.http_target import connect_to, key_refused, message_in
from hybridserve.bench.target import TargetError
from hybridserve.commands.table import table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ANSWER_SECONDS = 30.0
PREFIX = "hybridserve_"
WORTH_SAYING = 0.1
"""Share of the missed tokens from which something is said about a cause."""
_SAMPLE = re.compile(r"(?P<name>[a-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.ASCII)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Cause(NamedTuple):
    """Why tokens were missed: `name` in the table, what it means, and what could be done."""

    name: str
    meaning: str
    advice: str = ""


CAUSES: Mapping[str, Cause] = {
    "no_checkpoint": Cause(
        "no checkpoint",
        "K and V were there, and no state at their end",
        "a smaller cache.checkpoint_interval keeps states of long prompts more often",
    ),
    "parted": Cause(
        "parted early",
        "others who share the beginning went on differently",
        "put what all prompts share first, and what changes (a date, a name, a question) last",
    ),
    "evicted": Cause(
        "evicted",
        "they had been there, and made room for others",
        "more memory keeps more: cache.memory_bytes (or memory_fraction), or cache.host_swap_bytes",
    ),
    "other_adapter": Cause(
        "other adapter",
        "they were there, as another adapter or the base model computes them",
        "what adapters computed is not exchanged: send requests that share a prompt to one adapter",
    ),
    "short": Cause(
        "prompt too short",
        "of prompts that have no whole block before their last token",
        "a smaller cache.block_size keeps shorter beginnings",
    ),
    "new": Cause("never seen", "nobody with the same key and cache_salt has brought them lately"),
    "concurrent": Cause(
        "at the same time", "another request was computing them, and left no state where this one needed it"
    ),
    "remainder": Cause("last block", "after the last whole block before a prompt's last token"),
    "scored": Cause("scored", "of prompts whose own log-probabilities were asked for"),
}
KINDS: Mapping[str, str] = {
    "kv_live": "K and V of sequences",
    "state_live": "states of sequences",
    "kv_cached": "K and V that are kept",
    "checkpoints": "states that are kept",
    "fragmented": "between them",
    "free": "free",
}
HOST_KINDS: Mapping[str, str] = {
    "sequences": "of sequences that were swapped out",
    "prefix_blocks": "K and V that are kept",
    "checkpoints": "states that are kept",
    "free": "free",
}
HITS: Mapping[str, str] = {
    "prompt": "a prompt's end",
    "parting": "where prompts part",
    "interval": "an interval",
    "turn": "the end of an answer",
    "blocks": "any block",
}
"""Where what was found ended, by the reason for the state there."""


def inspect_server(url: str, api_key: str | None) -> str:
    """What is to be told. Raises TargetError."""
    plain = url.rstrip("/").removesuffix("/v1").rstrip("/")
    return report(plain, Series(asyncio.run(_fetch(url, plain, api_key)), plain))


async def _fetch(typed: str, url: str, api_key: str | None) -> str:
    """The page of metrics."""
    client, path = connect_to(typed, url, api_key)
    try:
        async with asyncio.timeout(ANSWER_SECONDS), client.request("GET", f"{path}/metrics") as response:
            body = await response.read()
    except TimeoutError:
        raise TargetError(f"{url}: no answer in {ANSWER_SECONDS:g} s") from None
    except HttpFailure as error:
        raise TargetError(f"{url}: {error}") from None
    finally:
        client.close()
    if response.status in (401, 403):
        raise TargetError(key_refused(url, response.status))
    if response.status == 404:
        raise TargetError(f"{url}: is no server of hybridserve: it has no /metrics")
    if response.status != 200:
        raise TargetError(f"{url}/metrics: {response.status}: {message_in(body)}")
    return body.decode(errors="replace")


class Series:
    """A page of metrics, by name without `hybridserve_`. Raises TargetError for one of another program, or of
    a server whose engine can't be asked."""

    def __init__(self, page: str, url: str) -> None:
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for line in page.splitlines():
            if not line.startswith(PREFIX) or not (sample := _SAMPLE.fullmatch(line)):
                continue
            labels = dict(_LABEL.findall(sample["labels"] or ""))
            try:
                value = float(sample["value"])
            except ValueError:
                continue
            self._samples[sample["name"].removeprefix(PREFIX)].append((labels, value))
        if not self._samples:
            raise TargetError(f"{url}: is no server of hybridserve: its /metrics has no {PREFIX}...")
        if not self.value("engine_up"):
            raise TargetError(f"{url}: its engine does not answer: it is loading a model, or has failed")
        if "prefix_cache_missed_tokens_total" not in self._samples:
            raise TargetError(f"{url}: its /metrics does not tell why tokens are computed: an older version")

    def value(self, name: str) -> int:
        """0 where there is none."""
        return int(next((value for _, value in self._samples.get(name, ())), 0))

    def by(self, name: str, label: str) -> dict[str, int]:
        """Label's value -> number, the largest first."""
        found = {labels.get(label, ""): int(value) for labels, value in self._samples.get(name, ())}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def labels(self, name: str) -> dict[str, str]:
        return next((labels for labels, _ in self._samples.get(name, ())), {})


def report(url: str, series: Series) -> str:
    """How things stand, where missed tokens went, and what could be done."""
    parts = [table(list(_state(url, series)))]
    misses = series.by("prefix_cache_missed_tokens_total", "cause")
    num_missed = sum(misses.values())
    if num_missed:
        rows = [_missed(name, count, count / num_missed) for name, count in misses.items() if count]
        parts.append("why tokens were computed\n" + table(rows))
    advice = list(_advice(series, misses, num_missed))
    if advice:
        parts.append("\n".join(["what could be done", *(f"  {line}" for line in advice)]))
    return "\n\n".join(parts)


def _missed(name: str, count: int, share: float) -> tuple[str, str]:
    cause = CAUSES.get(name, Cause(name, ""))
    return f"  {cause.name}", f"{count:>12,}  {share:>6.1%}  {cause.meaning}".rstrip()


def _state(url: str, series: Series) -> Iterator[tuple[str, str]]:
    config = series.labels("cache_config_info")
    running, waiting = series.value("num_requests_running"), series.value("num_requests_waiting")
    yield "server", f"{url}: {running:,} sequences run, {waiting:,} wait"
    if config.get("prefix_caching") == "False":
        yield "prefixes", "are not kept (cache.prefix_caching is false)"
    else:
        interval = int(config.get("checkpoint_interval", 0))
        often = f", and a state every {interval:,} tokens of a long prompt" if interval else ""
        yield "prefixes", f"are kept by blocks of {config.get('block_size', '?')} tokens{often}"
    sizes = series.by("cache_bytes", "kind")
    if total := sum(sizes.values()):
        shares = [f"{sizes[kind] / total:.1%} {words}" for kind, words in KINDS.items() if sizes.get(kind)]
        yield "memory", f"{total / 2**20:,.0f} MiB: {', '.join(shares)}"
    host = series.by("host_cache_bytes", "kind")
    if total := sum(host.values()):
        shares = [f"{host[kind] / total:.1%} {words}" for kind, words in HOST_KINDS.items() if host.get(kind)]
        yield "host", f"{total / 2**20:,.0f} MiB: {', '.join(shares)}"
    queried, hit = series.value("prefix_cache_queries_total"), series.value("prefix_cache_hits_total")
    if not queried:
        yield "prompts", "none so far"
        return
    yield "prompts", f"{queried:,} tokens since the server's start"
    yield "", f"{hit:,} ({hit / queried:.1%}) were there, {queried - hit:,} were computed"
    if hit:
        ends = series.by("prefix_cache_hit_tokens_total", "cause")
        shares = [f"{HITS.get(name, name)} {count / hit:.0%}" for name, count in ends.items() if count]
        yield "", f"what was there ended at {', '.join(shares)}"
    if waits := series.value("prefix_cache_waits_total"):
        yield (
            "waits",
            (
                f"{waits:,} requests waited for what another was computing, "
                f"{series.value('prefix_cache_waits_given_up_total'):,} in vain"
            ),
        )
    kept = series.value("state_checkpoints")
    taken, skipped, evicted, over_limit = _checkpoints(series)
    yield (
        "states",
        f"{kept:,} are kept; {taken:,} were taken, {skipped:,} found no room, {evicted:,} made room, "
        f"{over_limit:,} were too many on a path",
    )


def _checkpoints(series: Series) -> list[int]:
    """How many states were taken, how many were not for want of memory, and how many had to go for want of
    memory, and as their path had too many."""
    names = ("taken", "skipped", "evicted", "over_limit")
    return [series.value(f"state_checkpoints_{name}_total") for name in names]


def _advice(series: Series, misses: Mapping[str, int], num_missed: int) -> Iterator[str]:
    """What a user could turn, the cause of most misses first."""
    if series.labels("cache_config_info").get("prefix_caching") == "False":
        yield "cache.prefix_caching: true keeps what was computed of prompts"
        return
    for name, count in misses.items():
        cause = CAUSES.get(name)
        if cause and cause.advice and count > WORTH_SAYING * num_missed:
            yield f"{cause.name}: {cause.advice}"
    taken, skipped, *_ = _checkpoints(series)
    if skipped > WORTH_SAYING * (skipped + taken):
        yield f"{skipped:,} of {skipped + taken:,} states found no room: more memory keeps more of them"
