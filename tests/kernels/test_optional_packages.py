"""Backends over packages that are not installed here, against stand-ins with the packages' own signatures."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.attention import FlashAttn
from hybridserve.kernels.attention import Reference as AttentionReference
from hybridserve.kernels.registry import Capabilities, select
from hybridserve.kernels.ssm import MambaSSM
from tests.harness.packages import install
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels.test_attention import Case, Shape, make_metadata
from tests.kernels.test_ssm import Arena, Layer, batch_of, check_against_reference

pytestmark = pytest.mark.usefixtures("poisoned")

CUDA = Capabilities("cuda", "bfloat16", block_size=256)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn 2.8, as its documentation says: lengths are differences of sums, and the causal mask ends at
    the last key."""
    assert block_table is not None
    assert causal
    assert softmax_scale is not None
    assert {x.dtype for x in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert all(x.stride(-1) == 1 for x in (q, k, v, block_table))
    assert q.dtype == k.dtype == v.dtype
    assert not k.shape[1] % 256
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[2]
    starts = itertools.pairwise(cu_seqlens_q.tolist())
    for (start, end), length, pages in zip(starts, cu_seqlens_k.diff().tolist(), block_table, strict=True):
        keys, values = (
            x[pages.long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(length - end + start, length)[:, None] - torch.arange(length)
        hidden = behind < 0
        if window_size[0] >= 0:
            hidden = hidden | (behind > window_size[0])
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashAttn:
    install(monkeypatch, "flash_attn", flash_attn_varlen_func)
    assert FlashAttn.why_not(CUDA) is None
    return FlashAttn()


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 40])
def test_flash_attn_equals_the_reference(flash: FlashAttn, window: int | None, softcap: float | None) -> None:
    shape = Shape(block_size=256, dtype=torch.bfloat16)
    lengths = [(0, 5), (255, 1), (250, 9), (0, 1), (300, 2)]
    ours, expected = Case(lengths, shape, 0, poison=1e3), Case(lengths, shape, 0, poison=1e3)
    actual = ours.run(flash, window, softcap)
    wanted = expected.run(AttentionReference(), window, softcap)
    torch.testing.assert_close(actual, wanted, atol=2e-2, rtol=2e-2)
    assert torch.equal(ours.arena.bytes(), expected.arena.bytes())


def test_flash_attn_of_nothing_and_of_padding(flash: FlashAttn) -> None:
    case = Case([(3, 1)], Shape(block_size=256), 0, poison=1e3)
    assert len(case.run_part(flash, slice(0), make_metadata([], [], 256))) == 0
    padded = make_metadata([(3, 1), (0, 1)], [case.tables[0], [0]], 256)
    case.query, case.key, case.value = (torch.cat([x, x]) for x in (case.query, case.key, case.value))
    assert case.run_part(flash, slice(None), padded).isfinite().all()


def test_flash_attn_refuses_what_it_can_not_do(flash: FlashAttn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "block_size" in str(FlashAttn.why_not(Capabilities("cuda", "bfloat16", block_size=16)))
    assert "float32" in str(FlashAttn.why_not(Capabilities("cuda", "float32", block_size=256)))
    assert FlashAttn.why_not(Capabilities("cpu", "bfloat16", block_size=256)) == "no CUDA device"
    case = Case([(3, 1)], Shape(block_size=256), 0)
    with pytest.raises(TypeError, match="prepare"):
        flash.forward(case.query, case.key, case.value, case.cache, case.metadata(), scale=1.0)
    case.cache = case.cache.bfloat16()
    with pytest.raises(ValueError, match="bfloat16"):
        case.run(flash)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "flash-attn" in str(FlashAttn.why_not(CUDA))


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """mamba-ssm 2.2: one token a row, states in place, no notion of a row without state."""
    assert state_batch_indices is not None
    assert state_batch_indices.dtype == torch.int64, "else offsets would have 32 bits"
    assert D is not None
    assert dt_softplus
    assert x.shape == dt.shape == (len(state_batch_indices), state.shape[1])
    delta = F.softplus(dt.float() + (0 if dt_bias is None else dt_bias))
    h = state[state_batch_indices].float()
    h = torch.exp(delta[..., None] * A) * h + (delta * x.float())[..., None] * B.float()[:, None]
    state[state_batch_indices] = h.to(state.dtype)
    y = torch.einsum("bdn,bn->bd", h, C.float()) + D * x.float()
    return (y if z is None else y * F.silu(z.float())).to(x.dtype)


@pytest.fixture
def mamba(monkeypatch: pytest.MonkeyPatch) -> MambaSSM:
    require_triton()
    install(monkeypatch, "mamba_ssm.ops.triton.selective_state_update", selective_state_update)
    assert MambaSSM.why_not(CUDA) is None
    return MambaSSM()


@pytest.mark.parametrize("optional", [True, False], ids=["full", "bare"])
def test_mamba_ssm_equals_the_reference(mamba: MambaSSM, optional: bool) -> None:
    """Steps of one token each, where some have no state; and one with a prompt, which is not its to do."""
    for lens, states in (([1, 1, 1], [True, False, True]), ([1, 3], [True, False])):
        layer = Layer.random(sum(lens), optional=optional)
        check_against_reference(
            mamba, layer, Arena.random(1), batch_of(lens, [7, 3, 11][: len(lens)], states)
        )


def test_mamba_ssm_and_padding(mamba: MambaSSM) -> None:
    """A null slot of NaN spoils nothing, and no other slot is touched."""
    arena = Arena.random(2)
    arena.buffer[0] = float("nan")
    before = arena.buffer.clone()
    out = Layer.random(3).run(mamba, arena, batch_of([1, 1, 1], [4, 0, 0], [True, False, False]))
    assert out.isfinite().all()
    others = [slot for slot in range(1, len(before)) if slot != 4]
    assert torch.equal(arena.buffer[others], before[others])


def test_why_mamba_ssm_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    require_triton()
    assert MambaSSM.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert MambaSSM.why_not(CUDA) == "mamba-ssm is not installed"
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert "mamba-ssm" in str(MambaSSM.why_not(CUDA))


def test_auto_takes_neither(flash: FlashAttn, mamba: MambaSSM) -> None:
    """A row's bits would depend on its company, or on what the package does with it."""
    for op in ("attention", "ssm"):
        assert select(op, "auto", CUDA).name == "triton"
