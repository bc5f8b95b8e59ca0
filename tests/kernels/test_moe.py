"""Every mixture-of-experts backend against the reference: routing, grouping, company."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.gemm.products import Products
from hybridserve.kernels.moe import BACKENDS, Native, Reference
from hybridserve.kernels.moe import native as native_module
from hybridserve.kernels.registry import Capabilities
from tests.harness.native_libraries import load_anew

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybridserve.kernels.moe.interface import ExpertGroups, MoEBackend

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 24, 20


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> MoEBackend:
    """Skips where the backend can't run, or can't run with the dtype that the test asks for."""
    callspec = getattr(request.node, "callspec", None)
    dtype = callspec.params.get("dtype", torch.float32) if callspec else torch.float32
    return made(request.param, dtype)


@pytest.fixture
def native() -> Native:
    return made(Native)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(backend: type[MoEBackend], dtype: torch.dtype = torch.float32) -> MoEBackend:
    if reason := backend.why_not(Capabilities("cpu", str(dtype).removeprefix("torch."))):
        pytest.skip(f"{backend.name} {reason}")
    return backend()


def tokens(num: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [num, HIDDEN] and router logits [num, NUM_EXPERTS]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, HIDDEN, generator=generator).to(dtype)
    return x, torch.randn(num, NUM_EXPERTS, generator=generator).to(dtype)


def expert_weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return gate_up.to(dtype), down.to(dtype)


def run(
    backend: MoEBackend,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    return backend.experts(x, weights, ids, *backend.pack(*expert_weights(dtype)))


@pytest.mark.parametrize("num", [0, 1, 2, 5, 33])
@pytest.mark.parametrize("top_k", [1, 2, 3, NUM_EXPERTS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(backend: MoEBackend, num: int, top_k: int, dtype: torch.dtype, renormalize: bool) -> None:
    _, logits = tokens(num, dtype)
    weights, ids = backend.route(logits, top_k, renormalize=renormalize)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    assert weights.shape == ids.shape == (num, top_k)
    expected_weights, expected_ids = Reference().route(logits, top_k, renormalize=renormalize)
    torch.testing.assert_close(weights, expected_weights)
    assert torch.equal(ids, expected_ids)


def test_weights_are_shares_of_all_experts(backend: MoEBackend) -> None:
    """J2: Jamba keeps the softmax over all experts as it is; the kept weights sum to less than one."""
    _, logits = tokens(16)
    weights, ids = backend.route(logits, 2, renormalize=False)
    torch.testing.assert_close(weights, F.softmax(logits, dim=-1).gather(1, ids))
    assert (weights.sum(dim=1) < 0.99).all()
    renormalized, _ = backend.route(logits, 2, renormalize=True)
    torch.testing.assert_close(renormalized.sum(dim=1), torch.ones(16))


def test_reference_agrees_with_an_independent_formula() -> None:
    """Every expert computed for every token, weighted by a dense matrix of routing weights."""
    x, logits = tokens(9)
    weights, ids = Reference().route(logits, 3, renormalize=False)
    gate_up, down = expert_weights()
    dense = torch.zeros(9, NUM_EXPERTS).scatter(1, ids, weights)
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    expected = torch.einsum("tei,ehi,te->th", F.silu(gate) * up, down, dense)
    torch.testing.assert_close(run(Reference(), x, weights, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 5, 33, 100])
@pytest.mark.parametrize("top_k", [1, 2, 3, NUM_EXPERTS])
def test_experts(backend: MoEBackend, num: int, top_k: int) -> None:
    x, logits = tokens(num)
    weights, ids = backend.route(logits, top_k, renormalize=False)
    actual = run(backend, x, weights, ids)
    assert actual.shape == x.shape
    torch.testing.assert_close(actual, run(Reference(), x, weights, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num", [1, 2, 7, 40])
def test_half_precision(backend: MoEBackend, dtype: torch.dtype, num: int) -> None:
    """Against float32 arithmetic on the same weights. A backend may round the result, each projection and the
    activation to the half dtype: four roundings of numbers around one."""
    x, logits = tokens(num, dtype)
    weights, ids = backend.route(logits, 2, renormalize=False)
    actual = run(backend, x, weights, ids, dtype)
    assert actual.dtype == dtype
    gate_up, down = expert_weights(dtype)
    expected = Reference().experts(x.float(), weights, ids, gate_up, down)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def test_experts_that_nobody_chose_are_not_touched(backend: MoEBackend) -> None:
    x, _ = tokens(6)
    ids = torch.tensor([[2, 5]] * 6)
    weights = torch.full((6, 2), 0.25)
    gate_up, down = expert_weights()
    expected = backend.experts(x, weights, ids, gate_up, down)
    idle = torch.tensor([0, 1, 3, 4, 6, 7])
    gate_up[idle], down[idle] = float("nan"), float("nan")
    for num in (1, 6):
        actual = backend.experts(x[:num], weights[:num], ids[:num], gate_up, down)
        torch.testing.assert_close(actual, expected[:num])


def test_company_and_order_do_not_matter(backend: MoEBackend) -> None:
    x, logits = tokens(17)
    weights, ids = backend.route(logits, 2, renormalize=False)
    expected = run(backend, x, weights, ids)
    for row in range(17):
        one = slice(row, row + 1)
        torch.testing.assert_close(run(backend, x[one], weights[one], ids[one]), expected[one])
    order = torch.randperm(17, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(run(backend, x[order], weights[order], ids[order]), expected[order])


def test_the_same_batch_gives_the_same_bits(backend: MoEBackend) -> None:
    x, logits = tokens(40)
    weights, ids = backend.route(logits, 2, renormalize=False)
    first = run(backend, x, weights, ids)
    assert all(torch.equal(run(backend, x, weights, ids), first) for _ in range(5))


def test_a_nan_token_spoils_no_other(backend: MoEBackend) -> None:
    x, logits = tokens(8)
    weights, ids = backend.route(logits, 2, renormalize=False)
    expected = run(backend, x, weights, ids)
    x[3] = float("nan")
    actual = run(backend, x, weights, ids)
    others = torch.tensor([0, 1, 2, 4, 5, 6, 7])
    torch.testing.assert_close(actual[others], expected[others])


class Delta:
    """Adds multiples of its inputs, summed, to rows of some tokens; keeps what it was shown."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.groups: list[ExpertGroups] = []
        self.inputs: list[torch.Tensor] = []

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self._add(y, x.index_select(0, groups.tokens), groups)

    def add_down(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        self._add(y, x, groups)

    def _add(self, y: torch.Tensor, x: torch.Tensor, groups: ExpertGroups) -> None:
        assert len(y) == len(x) == len(groups.tokens)
        self.groups.append(groups)
        self.inputs.append(x)
        concerned = torch.isin(groups.tokens, torch.tensor(self.tokens, dtype=torch.int64))
        added = 0.1 * (1 + groups.experts[:, None]) * x.float().sum(dim=1, keepdim=True)
        y[concerned] += added[concerned].to(y.dtype)


@pytest.mark.parametrize("num", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
def test_delta(backend: MoEBackend, num: int, top_k: int) -> None:
    x, logits = tokens(num)
    weights, ids = backend.route(logits, top_k, renormalize=False)
    packed = backend.pack(*expert_weights())
    delta, reference_delta = Delta([0, 2, 3, 30]), Delta([0, 2, 3, 30])
    actual = backend.experts(x, weights, ids, *packed, delta)
    expected = Reference().experts(x, weights, ids, *expert_weights(), reference_delta)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    if num == 0:
        return
    without = backend.experts(x, weights, ids, *packed)
    alone = torch.ones(num, dtype=torch.bool)
    alone[[t for t in delta.tokens if t < num]] = False
    assert torch.equal(actual[alone], without[alone])
    assert not torch.equal(actual[~alone], without[~alone])
    assert torch.equal(backend.experts(x, weights, ids, *packed, Delta([])), without)
    order = ids.flatten().argsort(stable=True)
    for groups in delta.groups:
        assert torch.equal(groups.tokens, order // top_k)
        assert torch.equal(groups.experts, ids.flatten()[order])
        assert groups.tokens.dtype == groups.experts.dtype == torch.int64
    for seen, reference_seen in zip(delta.inputs, reference_delta.inputs, strict=True):
        torch.testing.assert_close(seen, reference_seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num", [1, 9])
def test_delta_in_bfloat16(backend: MoEBackend, num: int) -> None:
    x, logits = tokens(num, torch.bfloat16)
    weights, ids = backend.route(logits, 2, renormalize=False)
    actual = backend.experts(x, weights, ids, *backend.pack(*expert_weights(torch.bfloat16)), Delta([0, 4]))
    gate_up, down = expert_weights(torch.bfloat16)
    expected = Reference().experts(x.float(), weights, ids, gate_up, down, Delta([0, 4]))
    tolerance = 8 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.usefixtures("threads")
def test_native_bits_depend_on_no_company(native: Native, dtype: torch.dtype, with_delta: bool) -> None:
    """A token has the same bits alone and among any others, on one thread and on several, and in turns."""
    x, logits = tokens(150, dtype)
    weights, ids = native.route(logits, 2, renormalize=False)
    packed = native.pack(*expert_weights(dtype))

    def run_native(rows: torch.Tensor) -> torch.Tensor:
        delta = Delta([]) if with_delta else None
        return native.experts(x[rows], weights[rows], ids[rows], *packed, delta)

    torch.set_num_threads(1)
    expected = torch.cat([run_native(torch.tensor([row])) for row in range(150)])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for rows in (torch.arange(num) for num in (2, 3, 5, 16, 70, 150)):
            assert torch.equal(run_native(rows), expected[rows])
        assert torch.equal(run_native(order), expected[order])


def test_native_in_turns(native: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    x, logits = tokens(20)
    weights, ids = native.route(logits, 2, renormalize=False)
    expected = run(native, x, weights, ids)
    for elements in (1, 1000, 5000):
        monkeypatch.setattr(native_module, "_SCRATCH_ELEMENTS", elements)
        assert torch.equal(run(native, x, weights, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 5])
def test_native_reads_only_its_own(native: Native, num: int, dtype: torch.dtype) -> None:
    x, logits = tokens(num, dtype)
    weights, ids = native.route(logits, 2, renormalize=True)
    expected = run(native, x, weights, ids, dtype)
    wide_x = torch.full((num, HIDDEN + 9), float("nan"), dtype=dtype)
    wide_x[:, 5:-4] = x
    assert torch.equal(run(native, wide_x[:, 5:-4], weights, ids, dtype), expected)
    columns = x.t().contiguous().t()
    assert torch.equal(run(native, columns, weights, ids, dtype), expected)


def test_routing_of_nan_names_experts(backend: MoEBackend) -> None:
    """Ids are valid and different whatever the logits are, and the weights tell."""
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan, nan, nan, nan], [0, nan, 1, 2], [-inf, -inf, -inf, 0], [2.0, 2, 2, 2]])
    weights, ids = backend.route(logits, 3, renormalize=False)
    assert all(len(set(row)) == 3 and set(row) <= {0, 1, 2, 3} for row in ids.tolist())
    assert weights[:2].isnan().all()
    assert weights[2].tolist() == [1, 0, 0]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is x86's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_portable_code_equals_reference(
    native: Native, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a machine without AVX runs: other vectors, no fused multiply-add."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} -mno-avx")
    library = load_anew(native_module.SOURCE, native_module.FUNCTIONS)
    native._experts = library.experts
    native._products = Products(load_anew)
    x, logits = tokens(33, dtype)
    weights, ids = native.route(logits, 2, renormalize=False)
    actual = run(native, x, weights, ids, dtype)
    expected = Reference().experts(x.float(), weights, ids, *expert_weights(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
