"""Synthetic requests, and those of a file."""

from __future__ import annotations

import importlib.util
import itertools
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

import pytest

from hybridserve.bench.workload_file import read_workload
from hybridserve.bench.workloads import (
    MEAN_OUTPUT,
    MEAN_PROMPT,
    Conversation,
    Drawing,
    Turn,
    make_workload,
    take,
    with_adapters,
)

ROOT = Path(__file__).parents[2]
SYNTHETIC = ["W1", "W2", "W3", "W4", "sharegpt", "30x7"]


@pytest.fixture(scope="module")
def benchmarks():
    """benchmarks/workloads.py, which is no package."""
    spec = importlib.util.spec_from_file_location("benchmark_workloads", ROOT / "benchmarks" / "workloads.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def drawn(spec: str, count: int | None = None, **drawing):
    workload = make_workload(spec, Drawing(**drawing))
    return list(take(workload.conversations(), count or workload.num_requests))


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4"])
@pytest.mark.parametrize("vocab_size", [None, 8192, 65536])
def test_ids_are_those_of_the_benchmarks(benchmarks, name, vocab_size):
    for repeat in (0, 3):
        found = drawn(name, seed=repeat, vocab_size=vocab_size)
        assert [tuple(turn) for each in found for turn in each.turns] == benchmarks.WORKLOADS[name](repeat)


@pytest.mark.parametrize("name", SYNTHETIC)
def test_ids_are_below_a_small_vocabulary(name):
    ids = {i for each in drawn(name, 20, vocab_size=400) for turn in each.turns for i in turn.content}
    assert max(ids) < 400
    assert min(ids) == 1


@pytest.mark.parametrize("name", SYNTHETIC)
@pytest.mark.parametrize("form", ["ids", "text", "chat"])
def test_a_seed_repeats(name, form):
    assert drawn(name, 10, seed=5, form=form) == drawn(name, 10, seed=5, form=form)
    assert drawn(name, 10, seed=5, form=form) != drawn(name, 10, seed=6, form=form)


def test_w4_shares_its_beginning():
    for form in ("ids", "text", "chat"):
        contents = [each.turns[0].content for each in drawn("W4", form=form)]
        texts = [content[0]["content"] if form == "chat" else content for content in contents]
        shared = 512 if form == "ids" else len(texts[0].rsplit(" ", 16)[0])
        assert len({tuple(text[:shared]) for text in texts}) == 1
        assert len({tuple(text) for text in texts}) == 32


def test_lengths_like_sharegpt():
    sizes = [(len(turn.content), turn.max_tokens) for each in drawn("sharegpt", 4000) for turn in each.turns]
    prompts, outputs = zip(*sizes, strict=True)
    assert statistics.mean(prompts) == pytest.approx(MEAN_PROMPT, rel=0.1)
    assert statistics.mean(outputs) == pytest.approx(MEAN_OUTPUT, rel=0.1)
    assert statistics.median(prompts) == pytest.approx(78, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(225, rel=0.1)


def test_lengths_fit_the_model():
    for each in drawn("sharegpt", 300, limit=256, num_turns=2):
        assert sum(len(turn.content) + turn.max_tokens for turn in each.turns) <= 256


def test_turns_begin_once():
    (conversation,) = drawn("30x7", 3, num_turns=3)
    assert [turn.content[0] == 1 for turn in conversation.turns] == [True, False, False]
    assert [(len(turn.content), turn.max_tokens) for turn in conversation.turns] == [(30, 7)] * 3


def test_take_counts_turns():
    conversation = Conversation((Turn("a", 1), Turn("b", 1), Turn("c", 1)))
    found = list(take(itertools.repeat(conversation), 7))
    assert [len(each.turns) for each in found] == [3, 3, 1]


def test_adapters_are_mixed():
    source = itertools.repeat(Conversation((Turn("a", 1),)), 6000)
    uniform = Counter(each.adapter for each in with_adapters(source, ["a", None, "c"], 0.0, 1))
    assert all(abs(count - 2000) < 150 for count in uniform.values())
    source = itertools.repeat(Conversation((Turn("a", 1),)), 6600)
    zipf = Counter(each.adapter for each in with_adapters(source, ["a", None, "c"], 1.0, 1))
    assert [round(zipf[name] / 600) for name in ("a", None, "c")] == [6, 3, 2]


@pytest.mark.parametrize(
    ("spec", "drawing", "complaint"),
    [
        ("W9", {}, "'W9' is unknown"),
        ("sharegtp", {}, "did you mean sharegpt?"),
        ("0x5", {}, "must be at least 1"),
        ("W3", {"limit": 2048}, "requests of 2049 tokens in all, max_model_len is 2048"),
        ("60x60", {"limit": 239, "num_turns": 2}, "requests of 240 tokens"),
        ("W2", {"num_turns": 2}, "--turns: is for sharegpt and INxOUT"),
    ],
)
def test_bad_workload(spec, drawing, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        make_workload(spec, Drawing(**drawing))


def test_file(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text(
        '{"prompt": "Once", "max_tokens": 5, "adapter": "a", "top_p": 0.5}\n'
        "\n"
        '{"prompt": [1, 2], "ignore_eos": true, "temperature": 1.0, "logit_bias": {"7": 1}}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        '{"turns": ["Hello", "and then?"]}\n'
    )
    workload = read_workload(path, temperature=0.25)
    assert (workload.name, workload.num_requests, workload.concurrency) == ("w.jsonl", 5, 5)
    text, ids, messages, turns, again = itertools.islice(workload.conversations(), 5)
    assert text == Conversation((Turn("Once", 5),), "a", False, {"temperature": 0.25, "top_p": 0.5})
    assert ids.turns == (Turn([1, 2], 128),)
    assert ids.ignore_eos
    assert ids.sampling == {"temperature": 1.0, "logit_bias": {7: 1}}
    assert [each["role"] for each in messages.turns[0].content] == ["system", "user"]
    assert [turn.content[0]["content"] for turn in turns.turns] == ["Hello", "and then?"]
    assert again == text


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Expecting property name"),
        ("[1]", "a line is an object with one of prompt, messages, turns"),
        ('{"max_tokens": 3}', "with one of prompt"),
        ('{"prompt": "a", "turns": ["b"]}', "with one of prompt"),
        ('{"prompt": "a", "max_token": 3}', "'max_token': unknown; did you mean max_tokens?"),
        ('{"prompt": "a", "n": 2}', "'n': unknown"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "a", "temperature": -1}', "temperature"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "'x' is no token id"),
        ('{"prompt": "a", "adapter": 3}', "adapter: 3 is not a name"),
        ('{"prompt": ""}', "prompt: is neither"),
        ('{"prompt": [1, true]}', "prompt: is neither"),
        ('{"messages": [{"role": "user"}]}', "messages: is no list"),
        ('{"turns": [1]}', "turns: is no list of texts"),
        ("\xff", "utf-8"),
    ],
)
def test_bad_line(tmp_path, line, complaint):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:3: .*{re.escape(complaint)}"):
        read_workload(path)


def test_empty_file(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        read_workload(path)
