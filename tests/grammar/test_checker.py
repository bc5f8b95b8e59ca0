"""Descriptions are tried out within bounds: of time, of memory, of what is remembered."""

from __future__ import annotations

import importlib.util
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hybridserve.core.structured_outputs import StructuredOutputs
from hybridserve.grammar import checker as checker_module
from hybridserve.grammar.checker import GrammarChecker
from tests.harness.structured import save_byte_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return path / "tokenizer.json"


@pytest.fixture(scope="module")
def shared(file: Path) -> Iterator[GrammarChecker]:
    checker = GrammarChecker(file)
    yield checker
    checker.close()


def nested(depth: int) -> dict[str, Any]:
    if not depth:
        return {"type": "string"}
    inner = nested(depth - 1)
    return {"type": "object", "properties": {"a": {"oneOf": [inner, inner]}}, "required": ["a"]}


HOSTILE: dict[str, StructuredOutputs] = {
    "an enum of 20,000": StructuredOutputs(json={"enum": [f"value{i}" for i in range(20_000)]}),
    "a repeated repetition": StructuredOutputs(regex="(a{1,200}){1,200}"),
    "nested oneOf": StructuredOutputs(json=nested(6)),
    "a product of alternatives": StructuredOutputs(
        json={"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(14)]}
    ),
    "2,500 properties": StructuredOutputs(
        json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}
    ),
    "deep parentheses": StructuredOutputs(regex="(" * 20_000 + "a" + ")" * 20_000),
    "a deep grammar": StructuredOutputs(grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "a deep GBNF": StructuredOutputs(grammar="root ::= " + "(" * 9000 + '"a"' + ")" * 9000),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_s011_hostile_descriptions_are_quick_or_refused(shared: GrammarChecker, name: str) -> None:
    begin = time.monotonic()
    message = ""
    try:
        shared.check(HOSTILE[name])
    except ValueError as error:
        message = str(error)
    assert not message or message.startswith("structured_outputs.")
    assert len(message) < 400
    assert time.monotonic() - begin < 30  # of a busy machine; alone, well under a second


def test_s011_one_that_never_ends_is_ended_and_others_go_on(shared: GrammarChecker) -> None:
    endless = StructuredOutputs(json={"type": "integer", "multipleOf": 9_999_991})
    good = StructuredOutputs(regex="a{3}")
    assert shared.check(good) is good
    with pytest.raises(ValueError, match=r"^structured_outputs.json: is too complex \(compiling takes more"):
        shared.check(endless)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="too complex"):
        shared.check(endless)  # remembered
    assert shared.check(good) is good
    assert time.monotonic() - begin < 1
    assert shared.check(StructuredOutputs(regex="b{3}")).regex == "b{3}"  # by another worker


def test_memory_has_a_bound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself, on the worker: what its kernel lets it have."""
    checker = GrammarChecker(file)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._worker is not None
    soft, _ = psutil.Process(checker._worker.pid).rlimit(psutil.RLIMIT_AS)
    assert 0 < soft < 2**33
    checker.close()


def test_gbnf_comes_back_as_lark(shared: GrammarChecker) -> None:
    spec = shared.check(StructuredOutputs(grammar='root ::= "x" | "y" root\n'))
    assert spec.grammar is not None
    assert "start:" in spec.grammar
    assert shared.check(spec) is spec


def test_a_worker_that_was_killed_is_replaced(file: Path) -> None:
    checker = GrammarChecker(file)
    checker.check(StructuredOutputs(regex="a"))
    worker = checker._worker
    assert worker is not None
    worker.kill()
    worker.wait()
    checker.check(StructuredOutputs(regex="b"))
    assert checker._worker is not worker
    checker.close()
    assert checker._worker is not None
    assert checker._worker.poll() is not None


def test_a_worker_that_says_nothing_is_not_waited_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "ANSWER_SECONDS", 0.3)
    checker = GrammarChecker(file)
    checker._start()
    assert checker._worker is not None
    psutil.Process(checker._worker.pid).suspend()
    with pytest.raises(ValueError, match="too complex"):
        checker.check(StructuredOutputs(regex="a"))
    checker.close()


def test_s012_what_is_remembered_has_a_bound(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_VERDICTS", 10)
    checker = GrammarChecker(file)
    for number in range(30):
        checker.check(StructuredOutputs(regex=f"a{{{number}}}"))
        checker.check(StructuredOutputs(regex="a{0}"))  # used, so never the one that goes
    assert len(checker._verdicts) == 10
    calls: list[StructuredOutputs] = []
    monkeypatch.setattr(checker, "_ask", lambda spec: calls.append(spec) or checker_module.Verdict())
    checker.check(StructuredOutputs(regex="a{0}"))
    assert calls == []
    monkeypatch.setattr(checker_module, "MAX_VERDICT_BYTES", 100)
    for number in range(9):
        checker._remember(bytes([number]), checker_module.Verdict("x" * 40))
    assert len(checker._verdicts) == 2
    checker.close()


def test_many_threads_ask_for_the_same(file: Path) -> None:
    checker = GrammarChecker(file)
    asked = []
    plain = checker._ask

    def ask(spec: StructuredOutputs) -> Any:
        asked.append(spec)
        return plain(spec)

    checker._ask = ask  # type: ignore[method-assign]
    threads = [
        threading.Thread(target=checker.check, args=[StructuredOutputs(regex=f"a{i % 2}")]) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 2
    checker.close()


def test_without_llguidance_the_extra_is_named(
    shared: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llguidance" else plain(name)
    )
    with pytest.raises(ValueError, match=r"^structured_outputs: needs llguidance.*hybridserve\[server\]"):
        shared.check(StructuredOutputs(regex="a"))


def test_a_tokenizer_that_cant_be_used_is_an_answer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checker = GrammarChecker(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"^structured_outputs: the tokenizer can't be used"):
        checker.check(StructuredOutputs(regex="a"))
    checker.close()
