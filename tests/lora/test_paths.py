"""Names and paths that come from outside: what is refused, and that nothing outside the roots is opened
(L060, S025)."""

from __future__ import annotations

import builtins
import os
from typing import TYPE_CHECKING

import pytest

from hybridserve.lora.paths import AdapterSource, check_name, runtime_source

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["a", "A-1.b_c", "0", "x" * 64, "v1..2"])
def test_names_that_are_allowed(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/etc", "a/../../b", "a/b", "a\\b", "-a", ".hidden", "a b", "a\n", "a\0b"),
        *("x" * 65, "x" * 10_000, "\u0430dmin", "\uff41", "a\u2024b", "\u2025", "naïve", "a\u0301", "\ud800"),
        *(None, 3, b"a", ["a"]),
    ],
    ids=ascii,
)
def test_s025_l060_names_that_are_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"^adapter: ") as error:
        check_name(name)
    assert len(str(error.value)) < 300
    assert str(error.value).isascii()
    assert "\n" not in str(error.value)


def test_names_of_the_base_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^adapter: 'demo' is a name of the base model"):
        check_name("demo", {"demo"})


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Two roots with an adapter each, and one beside them."""
    for name in ("one/a", "two/b", "outside/c", "one-more/d"):
        directory = tmp_path / name
        directory.mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (directory / file).write_text("{}")
    return [tmp_path / "one", tmp_path / "two"]


def test_relative_and_absolute_paths_under_a_root(roots: list[Path]) -> None:
    assert runtime_source("a", roots).path == roots[0] / "a"
    assert runtime_source("b", roots).path == roots[1] / "b"
    assert runtime_source(roots[1] / "b", roots).path == roots[1] / "b"
    assert runtime_source("../one/a", roots).path == roots[0] / "a"


def _bad_paths(root: Path) -> dict[str, object]:
    outside = root.parent / "outside"
    (root / "link").symlink_to(outside / "c")
    (root / "chain").symlink_to("link")
    (root / "loop").symlink_to("loop")
    half = root / "half"
    half.mkdir()
    (half / "adapter_config.json").write_text("{}")
    (half / "adapter_model.safetensors").symlink_to(outside / "c" / "adapter_model.safetensors")
    return {
        "the root itself": str(root),
        "absolute": str(outside / "c"),
        "absolute, nothing there": str(outside / "nothing"),
        "relative": "../outside/c",
        "through a directory": "a/../../outside/c",
        "a name that begins as a root's does": str(root.parent / "one-more" / "d"),
        "a link": "link",
        "a link to a link": "chain",
        "a link to itself": "loop",
        "one file is a link": "half",
        "NUL": "a\0b",
        "long": "x" * 10_000,
        "a long part": "x" * 3000,
        "empty": "",
        "dot": ".",
        "root of all": "/",
        "etc": "/etc",
        "no text": 3,
        "bytes": b"a",
        "not to be encoded": "\ud800",
    }


def test_s025_l060_paths_that_are_refused(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(os, "open", lambda *args, **_: opened.append(args))
    monkeypatch.setattr(builtins, "open", lambda *args, **_: opened.append(args))
    for what, path in _bad_paths(roots[0]).items():
        with pytest.raises(ValueError, match=r"^path: ") as error:
            runtime_source(path, roots)
        assert len(str(error.value)) < 300, what
    assert opened == []


def test_the_answer_does_not_tell_what_is_outside(roots: list[Path]) -> None:
    outside = roots[0].parent / "outside"
    answers = set()
    for path in (outside / "c", outside / "n"):
        with pytest.raises(ValueError, match="not under") as error:
            runtime_source(path, roots)
        answers.add(str(error.value).replace("/c'", "/n'"))
    assert len(answers) == 1


def test_without_roots_nothing_may_be_loaded(roots: list[Path]) -> None:
    with pytest.raises(ValueError, match=r"lora\.roots is empty"):
        runtime_source(roots[0] / "a", [])


def test_a_link_that_is_changed_afterwards_is_noticed(roots: list[Path]) -> None:
    source = runtime_source("a", roots)
    source.check()
    (roots[0] / "a").rename(roots[0] / "moved")
    (roots[0] / "a").symlink_to(roots[0].parent / "outside" / "c")
    with pytest.raises(ValueError, match="not under"):
        source.check()


def test_a_root_may_be_a_link_itself(roots: list[Path], tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(roots[0])
    assert runtime_source("a", [tmp_path / "alias"]).path == roots[0] / "a"


def test_what_the_operator_names_is_trusted(roots: list[Path]) -> None:
    AdapterSource(roots[0].parent / "outside" / "c").check()
