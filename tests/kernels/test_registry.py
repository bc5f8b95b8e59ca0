"""Backends are chosen once, by preference or by name, and never silently replaced."""

from __future__ import annotations

import pytest

from hybridserve.kernels.attention import BACKENDS
from hybridserve.kernels.registry import Backend, Capabilities, candidates, select, sources

CPU = Capabilities("cpu", "float32")


class Fast(Backend):
    name = "fast"

    @classmethod
    def why_not(cls, capabilities: Capabilities) -> str | None:
        return None if capabilities.device == "cuda" else "needs an NVIDIA GPU"


class Plain(Backend):
    name = "plain"


class Slow(Backend):
    name = "slow"


TABLE = (Fast, Plain, Slow)


def test_auto_takes_the_first_that_runs() -> None:
    choice = select("attention", "auto", CPU, TABLE)
    assert (choice.op, choice.name, type(choice.backend)) == ("attention", "plain", Plain)
    assert choice.rejected == (("fast", "needs an NVIDIA GPU"), ("slow", "plain is preferred"))
    assert choice.obstacles == (("fast", "needs an NVIDIA GPU"),)
    on_gpu = select("attention", "auto", Capabilities("cuda", "bfloat16"), TABLE)
    assert on_gpu.name == "fast"
    assert [name for name, _ in on_gpu.rejected] == ["plain", "slow"]


def test_nothing_is_built_for_a_variant_that_nobody_asked_for() -> None:
    """It runs where its base does; asking it would build what it runs."""
    asked = []

    class Built(Backend):
        name = "built"

        @classmethod
        def why_not(cls, capabilities: Capabilities) -> str | None:
            asked.append(cls.name)
            return None if capabilities.device == "cpu" else "runs on CPUs only"

    class Exact(Built):
        name = "exact_built"

    table = (Built, Exact, Plain)
    choice = select("gemm", "auto", CPU, table)
    assert (choice.name, asked) == ("built", ["built"])
    assert choice.rejected[0] == ("exact_built", "built is preferred")
    assert select("gemm", "auto", Capabilities("cuda", "float32"), table).name == "plain"
    assert select("gemm", "exact_built", CPU, table).name == "exact_built"
    assert "exact_built" in asked
    names = {path.stem for path in sources(["gemm", "moe"], Capabilities("cpu", "float32", weights="int8"))}
    assert names == {"native", "float32", "whole"}


def test_a_named_backend_is_taken() -> None:
    choice = select("attention", "slow", CPU, TABLE)
    assert isinstance(choice.backend, Slow)
    assert dict(choice.rejected) == {"fast": "needs an NVIDIA GPU", "plain": "slow was asked for"}


@pytest.mark.parametrize(
    ("wanted", "table", "words"),
    [
        (
            "fast",
            TABLE,
            ["'fast' can't run", "cpu with float32", "fast: needs an NVIDIA GPU", "plain: can run"],
        ),
        ("fats", TABLE, ["no attention backend 'fats'", "fast: needs an NVIDIA GPU", "slow: can run"]),
        ("auto", (Fast,), ["no attention backend can run", "fast: needs an NVIDIA GPU"]),
        ("auto", (), ["none known"]),
    ],
)
def test_what_cannot_run_is_an_error_with_every_reason(
    wanted: str, table: tuple[type[Backend], ...], words: list[str]
) -> None:
    with pytest.raises(ValueError, match="backend") as error:
        select("attention", wanted, CPU, table)
    for word in words:
        assert word in str(error.value)


def test_tables_are_found_by_operator() -> None:
    assert candidates("attention") == BACKENDS
    first = next(backend for backend in BACKENDS if backend.why_not(CPU) is None)
    assert select("attention", "auto", CPU).name == first.name
    assert select("attention", "reference", CPU).name == "reference"
    with pytest.raises(ValueError, match="no operator 'atention'"):
        select("atention", "auto", CPU)


def test_two_choices_share_no_instance() -> None:
    first, second = (select("attention", "auto", CPU) for _ in range(2))
    assert first.backend is not second.backend
