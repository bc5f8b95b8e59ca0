"""The prefix cache as clients of a real server see it: cached tokens, equal answers, counters that tell why.

Each test asserts that what it is about has really happened (B050): cached tokens, or a counter that moved.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.processes import wait_until
from tests.harness.serve_process import Server, server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ANN, BOB = "sk-of-ann", "sk-of-bob"
BLOCK, CHUNK = 16, 32
LAYOUT = (
    f"cache: {{block_size: {BLOCK}, memory_bytes: 64MiB, checkpoint_interval: 512, check_integrity: true}}"
)
_salts = itertools.count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("prefix") / "serve.yaml"
    file.write_text(
        f"model: demo\ndtype: float32\nmax_model_len: 1024\n{LAYOUT}\n"
        f"scheduler: {{max_num_batched_tokens: {CHUNK}, max_num_seqs: 16}}\n"
        f"server: {{api_keys: [{ANN}, {BOB}]}}\n"
    )
    with server("--verbose", file=file) as one:
        yield one
        one.signal(signal.SIGTERM)
        assert one.wait_exit() == 0


def auth(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300, 4000) for _ in range(count)]


def ask(one: Server, prompt: Sequence[Any], key: str = ANN, max_tokens: int = 3, **more: Any) -> Any:
    """The answer, greedy, with the log-probabilities of what was drawn."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, answer = one.post(
        "/v1/completions", {**body, "logprobs": 2, "return_token_ids": True, **more}, **auth(key)
    )
    assert status == 200, answer
    return answer


def num_cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def new_salt() -> str:
    """One that nobody has used: all is computed."""
    return f"cold {next(_salts)}"


def check_equal(warm: Any, cold: Any) -> None:
    ours, theirs = warm["choices"][0], cold["choices"][0]
    assert ours["token_ids"] == theirs["token_ids"]
    pairs = zip(ours["logprobs"]["token_logprobs"], theirs["logprobs"]["token_logprobs"], strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-4


@contextlib.contextmanager
def counted(one: Server) -> Iterator[dict[str, float]]:
    """What the counters of prefixes, by cause or name, have grown by when the context ends."""
    before = one.series(**auth(ANN))
    grown: dict[str, float] = {}
    yield grown
    for name, value in one.series(**auth(ANN)).items():
        short = name.removeprefix("hybridserve_")
        if short.startswith(("prefix_cache_", "state_checkpoints_", "request_success")):
            short = short.replace("prefix_cache_", "").replace("_tokens_total", "")
            if value != before.get(name, 0):
                grown[short] = value - before.get(name, 0)


# ---- B042: how much is a hit, and why no more


@pytest.mark.parametrize(
    ("percent", "second", "missed", "third"),
    [
        (60, 0, {"no_checkpoint": 240, "parted": 144, "remainder": 16}, 240),
        (95, 0, {"no_checkpoint": 368, "parted": 16, "remainder": 16}, 368),
        (96, 384, {"remainder": 16}, 384),
        (100, 384, {"remainder": 16}, 384),
    ],
)
def test_b042_prompts_that_share_a_part(served, percent, second, missed, third):
    """400 tokens, so a state at 384, and, from the second one on that leaves the path there, one where they
    part. The metric tells a state that is missing from a match that is."""
    salt, prompt = new_salt(), tokens(400)
    shared = 400 * percent // 100
    assert num_cached(ask(served, prompt, cache_salt=salt)) == 0

    def other(seed: int) -> list[int]:
        return prompt[:shared] + tokens(400 - shared, seed=seed)

    with counted(served) as grown:
        assert num_cached(ask(served, other(1), cache_salt=salt)) == second
    told = {cause: grown.get(f'missed{{cause="{cause}"}}', 0) for cause in missed}
    assert told == missed
    assert grown.get("hits_total", 0) == second
    assert num_cached(ask(served, other(2), cache_salt=salt)) == third


def test_b042_no_match_is_told_from_no_checkpoint(served):
    with counted(served) as grown:
        assert num_cached(ask(served, tokens(400, seed=3), cache_salt=new_salt())) == 0
    assert grown['missed{cause="new"}'] == 384
    assert not [name for name in grown if "no_checkpoint" in name]


# ---- B043: cold and warm are the same


BORDERS = sorted({border + off for border in (BLOCK, CHUNK, 3 * BLOCK, 2 * CHUNK) for off in (-1, 0, 1)})


@pytest.mark.parametrize("shared", BORDERS)
def test_b043_cold_and_hit_are_equal_at_every_offset(served, shared):
    salt, prompt = new_salt(), tokens(90, seed=4)
    ask(served, prompt, cache_salt=salt)
    hits = []
    for seed in (5, 6, 7):
        other = prompt[:shared] + tokens(23, seed=seed)
        warm = ask(served, other, cache_salt=salt)
        hits.append(num_cached(warm))
        cold = ask(served, other, cache_salt=new_salt())
        assert num_cached(cold) == 0
        check_equal(warm, cold)
    whole = shared // BLOCK * BLOCK
    assert hits == [0, whole, whole]  # the first, which leaves the state there, reuses K and V alone


def test_b043_the_turns_of_a_chat(served):
    said: list[dict[str, str]] = []
    salt = new_salt()
    for turn in range(4):
        said.append(
            {"role": "user", "content": f"And what of the year {turn}, and of all that was before it?"}
        )
        body = {"messages": said, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        status, warm = served.post("/v1/chat/completions", {**body, "cache_salt": salt}, **auth(ANN))
        assert status == 200
        _, cold = served.post("/v1/chat/completions", {**body, "cache_salt": new_salt()}, **auth(ANN))
        assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
        assert num_cached(cold) == 0
        assert (num_cached(warm) > 0) is (turn > 0)
        said.append(warm["choices"][0]["message"])


# ---- B010: who leaves in the middle


def test_b010_a_prompt_that_is_given_up_leaves_nothing_half_built(served):
    """Its client leaves at any moment of its 13 chunks; who comes after it with the same prompt gets what he
    would have got alone, and reuses what was whole."""
    prompt = tokens(400, seed=8)
    cold = ask(served, [*prompt, 7], cache_salt=new_salt())
    partial = set()
    with counted(served) as grown:
        for pause in (0.0, 0.004, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08):
            salt = new_salt()
            body = {
                "prompt": prompt,
                "max_tokens": 200,
                "ignore_eos": True,
                "stream": True,
                "cache_salt": salt,
            }
            response = served.request("POST", "/v1/completions", body, **auth(ANN))
            time.sleep(pause)
            response.close()
            served.wait_idle(**auth(ANN))
            warm = ask(served, [*prompt, 7], cache_salt=salt)
            check_equal(warm, cold)
            partial.add(num_cached(warm))
    assert grown['request_success_total{finished_reason="abort"}'] == 8
    assert partial <= {0, *range(BLOCK, 401, BLOCK)}


# ---- S028: tenants


def test_s028_another_tenant_finds_nothing(served):
    prompt = tokens(200, seed=9)
    assert num_cached(ask(served, prompt, ANN)) == 0
    with counted(served) as grown:
        assert num_cached(ask(served, prompt, BOB)) == 0
    assert {name for name in grown if name.startswith("missed")} == {
        'missed{cause="new"}',
        'missed{cause="remainder"}',
    }
    assert num_cached(ask(served, prompt, ANN)) == num_cached(ask(served, prompt, BOB)) == 192


def test_s028_a_salt_narrows_a_tenant_and_opens_no_other(served):
    prompt = tokens(200, seed=10)
    assert num_cached(ask(served, prompt, ANN, cache_salt="app")) == 0
    assert num_cached(ask(served, prompt, ANN)) == 0
    assert num_cached(ask(served, prompt, ANN, cache_salt="app")) == 192
    for asked in ("app", f"{ANN}:app", ":app", ANN):
        assert num_cached(ask(served, prompt, BOB, cache_salt=asked)) == 0


def test_no_key_nor_salt_is_in_the_log_or_the_metrics(served):
    ask(served, tokens(40, seed=11), ANN, cache_salt="xylophone-salt")
    page = served.get("/metrics", **auth(ANN))[1].decode()
    text = "\n".join(served.log) + page
    for secret in (ANN, BOB, "xylophone-salt"):
        assert secret not in text


# ---- usage, the log, and what the arena holds


def test_usage_tells_cached_tokens_wherever_there_is_usage(served):
    prompt, salt = tokens(100, seed=12), new_salt()
    ask(served, prompt, cache_salt=salt)
    assert num_cached(ask(served, prompt, cache_salt=salt, n=2, temperature=1.0)) == 96
    several = ask(served, [prompt, prompt], cache_salt=salt)
    assert num_cached(several) == 2 * 96
    body = {"prompt": prompt, "max_tokens": 3, "stream": True, "cache_salt": salt}
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = served.request("POST", "/v1/completions", {**body, "stream_options": options}, **auth(ANN))
    events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: {")]
    first, *_, last = [json.loads(event)["usage"] for event in events]
    assert "prompt_tokens_details" not in first  # before the end, nobody knows
    assert last["prompt_tokens_details"] == {"cached_tokens": 96}


def test_the_log_has_a_request_s_tokens(served):
    prompt, salt = tokens(103, seed=13), new_salt()
    ask(served, prompt, cache_salt=salt)
    ask(served, prompt, cache_salt=salt)
    assert wait_until(lambda: sum("103 prompt tokens" in line for line in served.log) == 2)
    lines = [line for line in served.log if "103 prompt tokens" in line]
    assert "103 prompt tokens (0 cached), 3 generated" in lines[0]
    assert "103 prompt tokens (96 cached), 3 generated" in lines[1]


def test_what_is_kept_is_not_in_use(served):
    """`kv_cache_usage_perc` is what sequences hold: what is kept can be had."""
    ask(served, tokens(300, seed=14))
    served.wait_idle(**auth(ANN))
    series = {name.removeprefix("hybridserve_"): value for name, value in served.series(**auth(ANN)).items()}
    assert series["kv_cache_usage_perc"] == series["kv_blocks_used"] == series["state_slots_used"] == 0
    assert series["kv_blocks_cached"] >= 18
    assert series["state_checkpoints"] >= 1
    kinds = {name: value for name, value in series.items() if name.startswith("cache_bytes")}
    assert kinds['cache_bytes{kind="kv_cached"}'] > 0
    assert kinds['cache_bytes{kind="checkpoints"}'] > 0
    assert kinds['cache_bytes{kind="kv_live"}'] == kinds['cache_bytes{kind="state_live"}'] == 0
    assert len(kinds) == 6


def test_hits_and_misses_are_all_tokens_of_prompts(served):
    series = served.series(**auth(ANN))
    total = sum(value for name, value in series.items() if "prefix_cache_missed_tokens_total" in name)
    hits = series["hybridserve_prefix_cache_hits_total"]
    assert hits > 0
    by_cause = sum(value for name, value in series.items() if "prefix_cache_hit_tokens_total" in name)
    assert by_cause == hits
    assert total + hits == series["hybridserve_prefix_cache_queries_total"]
