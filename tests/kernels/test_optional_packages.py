"""Backends over packages that are not installed here, against stand-ins with the packages' own signatures."""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hybridserve.kernels.attention import FlashAttn
from hybridserve.kernels.attention import Reference as AttentionReference
from hybridserve.kernels.registry import Capabilities, select
from hybridserve.kernels.ssm import CausalConv1d, MambaSSM, causal_conv1d, mamba_ssm
from hybridserve.kernels.ssm import Reference as SSMReference
from tests.harness.packages import install
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_ssd, test_ssm
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
    """mamba-ssm 2.3: one token a row, with or without heads; states in place, no notion of a row without
    state. It can't do without D and dt_bias, whatever its signature says."""
    assert state_batch_indices is not None
    assert state_batch_indices.dtype == torch.int64, "else offsets would have 32 bits"
    assert D is not None
    assert dt_bias is not None
    assert dt_softplus
    batch, sizes = len(state_batch_indices), state.shape[1:]
    assert x.shape == dt.shape == (batch, *sizes[:-1])
    assert z is None or z.shape == x.shape
    assert A.shape == sizes
    assert D.shape == dt_bias.shape == sizes[:-1]
    if len(sizes) == 3:  # the package takes a head's scalars for such where they are repeated without memory
        assert A.stride()[1:] == (0, 0)
        assert dt.stride(-1) == dt_bias.stride(-1) == 0
        B, C = (each.repeat_interleave(sizes[0] // each.shape[1], 1).unsqueeze(2) for each in (B, C))
    else:
        B, C = B.unsqueeze(1), C.unsqueeze(1)
    delta = F.softplus(dt.float() + dt_bias)
    h = state[state_batch_indices].float()
    h = torch.exp(delta.unsqueeze(-1) * A) * h + (delta * x.float()).unsqueeze(-1) * B.float()
    state[state_batch_indices] = h.to(state.dtype)
    y = (h * C.float()).sum(-1) + D * x.float()
    return (y if z is None else y * F.silu(z.float())).to(x.dtype)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """mamba-ssm 2.3: rows of one length, each with an initial state; final states in float32."""
    assert seq_idx is None, "it would cut rows, and know one initial state for all of them"
    assert cu_seqlens is None
    assert not return_varlen_states
    assert dt_softplus
    assert return_final_states
    assert D is not None
    assert initial_states is not None
    batch, length, heads, size = x.shape
    assert initial_states.shape == (batch, heads, size, B.shape[3])
    assert chunk_size & (chunk_size - 1) == 0
    assert length <= mamba_ssm.CALL_TOKENS
    state, rows = initial_states.float().clone(), []
    for row in range(batch):
        metadata = test_ssd.batch_of([length], [row], [True])
        arguments = (x[row], dt[row], A, B[row], C[row], D, None if z is None else z[row], dt_bias)
        rows.append(SSMReference().ssd_scan(*arguments, state, metadata, dt_limits=dt_limit))
    return torch.stack(rows), state


@pytest.fixture
def mamba(monkeypatch: pytest.MonkeyPatch) -> MambaSSM:
    require_triton()
    install(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined)
    parents = {name: sys.modules[name] for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")}
    install(monkeypatch, "mamba_ssm.ops.triton.selective_state_update", selective_state_update)
    for name, module in parents.items():
        monkeypatch.setitem(sys.modules, name, module)
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


@pytest.mark.parametrize(("optional", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
def test_mamba_ssm_equals_the_reference_of_mamba2(
    mamba: MambaSSM, monkeypatch: pytest.MonkeyPatch, optional: bool, dtype: torch.dtype
) -> None:
    """One token each, with and without limits that the package does not know; a prompt of several calls,
    beside short sequences and one without state."""
    monkeypatch.setattr(mamba_ssm, "CALL_TOKENS", 7)
    within = 2e-5 if dtype == torch.float32 else 2**-6
    for lens, states, limits in (
        ([1, 1, 1], [True, False, True], (0.0, math.inf)),
        ([1, 1], [True, False], (0.1, 0.4)),
        ([2, 16, 1, 9], [True, True, False, False], (0.0, 0.5)),
    ):
        layer = test_ssd.Layer.random(sum(lens), heads=4, optional=optional, dtype=dtype)
        batch = test_ssd.batch_of(lens, [7, 3, 11, 1][: len(lens)], states)
        memory = test_ssd.arena(1, heads=4)
        test_ssd.check_against_reference(mamba, layer, memory, batch, within, dt_limits=limits)


def test_mamba_ssm_has_mamba2s_prompts_and_steps(mamba: MambaSSM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is its to do is done by it; and a null slot of NaN spoils nothing."""
    calls: list[str] = []
    for name in ("_update", "_scan_chunks"):
        function = getattr(mamba, name)
        monkeypatch.setattr(mamba, name, lambda *a, f=function, n=name, **k: calls.append(n) or f(*a, **k))
    layer, memory = test_ssd.Layer.random(11, heads=2, dtype=torch.bfloat16), test_ssd.arena(2, heads=2)
    memory[0] = float("nan")
    before = memory.clone()
    layer.tokens(slice(0, 2)).run(mamba, memory, test_ssd.batch_of([1, 1], [4, 0], [True, False]))
    assert calls == ["_update"]
    out = layer.run(mamba, memory, test_ssd.batch_of([10, 1], [5, 0], [False, False]))
    assert calls == ["_update", "_scan_chunks"]
    assert out.isfinite().all()
    others = [slot for slot in range(1, len(before)) if slot not in (4, 5)]
    assert torch.equal(memory[others], before[others])


def test_why_mamba_ssm_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    require_triton()
    assert MambaSSM.why_not(Capabilities("cpu", "float32")) == "no CUDA device"
    assert MambaSSM.why_not(CUDA) == "mamba-ssm is not installed"
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        module = ModuleType(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    assert "mamba-ssm" in str(MambaSSM.why_not(CUDA))


def convolve(
    x: torch.Tensor,
    past: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, C, L] after the inputs past [B, C, W - 1], and the last of them all."""
    assert activation in (None, "silu", "swish")
    assert weight.shape[1] in (2, 3, 4)
    assert bias is None or bias.dtype == weight.dtype
    assert past.dtype == x.dtype
    inputs = torch.cat([past, x], 2)
    bias = None if bias is None else bias.float()
    y = F.conv1d(inputs.float(), weight.float().unsqueeze(1), bias, groups=len(weight))
    return (y if activation is None else F.silu(y)).to(x.dtype), inputs[:, :, x.shape[2] :]


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal-conv1d 1.5: rows of one length; with initial states only where channels are innermost."""
    assert seq_idx is None
    assert final_states_out is None
    assert return_final_states
    assert initial_states is not None
    assert initial_states.stride(1) == x.stride(1) == 1
    assert all(size % 8 == 0 for size in (x.shape[1], x.stride(2), x.stride(0), x.storage_offset()))
    return convolve(x, initial_states, weight, bias, activation)


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """causal-conv1d 1.5: one token a row, states in place, by slots of 32 bits."""
    assert cache_seqlens is None
    rows = torch.arange(len(x))
    if conv_state_indices is not None:
        assert conv_state_indices.dtype == torch.int32
        rows = conv_state_indices.long()
    y, conv_state[rows] = convolve(x.unsqueeze(2), conv_state[rows], weight, bias, activation)
    return y.squeeze(2)


@pytest.fixture
def conv(monkeypatch: pytest.MonkeyPatch) -> CausalConv1d:
    require_triton()
    monkeypatch.setattr(test_ssm, "NUM_CHANNELS", 8)
    install(monkeypatch, "causal_conv1d", causal_conv1d_fn, causal_conv1d_update)
    assert CausalConv1d.why_not(CUDA) is None
    return CausalConv1d()


def convolved(layer: Layer, backend: Any, arena: Arena, batch: Any, *, silu: bool = True) -> torch.Tensor:
    prepared = backend.prepare(batch)
    return backend.causal_conv1d(layer.x, layer.conv_weight, layer.conv_bias, arena.conv, prepared, silu=silu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("span", [2**31, 10], ids=["in place", "copied"])
def test_causal_conv1d_equals_the_reference(
    conv: CausalConv1d, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, span: int
) -> None:
    """One token each; prompts beside short sequences; an arena that the package can and can't address."""
    monkeypatch.setattr(causal_conv1d, "MAX_SPAN", span)
    within = 2e-5 if dtype == torch.float32 else 2**-7
    for lens, states in (([1, 1, 1], [True, False, True]), ([2, 12, 1, 9], [True, True, False, False])):
        layer = Layer.random(sum(lens), dtype=dtype)
        batch = batch_of(lens, [7, 3, 11, 1][: len(lens)], states)
        for silu in (True, False):
            ours, theirs = Arena.random(1, dtype=dtype), Arena.random(1, dtype=dtype)
            actual = convolved(layer, conv, ours, batch, silu=silu)
            expected = convolved(layer, SSMReference(), theirs, batch, silu=silu)
            torch.testing.assert_close(actual, expected, rtol=within, atol=within)
            assert torch.equal(ours.buffer[1:], theirs.buffer[1:])


def test_causal_conv1d_and_padding(conv: CausalConv1d) -> None:
    """A null slot of NaN spoils nothing, and no other slot is touched."""
    for lens in ([1, 1, 1], [1, 9, 1]):
        arena = Arena.random(2)
        arena.buffer[0] = float("nan")
        before = arena.buffer.clone()
        batch = batch_of(lens, [4, 0, 0], [True, False, False])
        assert convolved(Layer.random(sum(lens)), conv, arena, batch).isfinite().all()
        others = [slot for slot in range(1, len(before)) if slot != 4]
        assert torch.equal(arena.buffer[others], before[others])


def test_causal_conv1d_of_nothing(conv: CausalConv1d) -> None:
    arena, before = Arena.random(2), Arena.random(2)
    assert len(convolved(Layer.random(0), conv, arena, batch_of([], [], []))) == 0
    convolved(Layer.random(9), conv, arena, batch_of([0, 9], [4, 5], [True, True]))
    assert torch.equal(arena.buffer[4], before.buffer[4])


def test_causal_conv1d_refuses_what_it_can_not_do(
    conv: CausalConv1d, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, arena, batch = Layer.random(1), Arena.random(1), batch_of([1], [3], [True])
    with pytest.raises(TypeError, match="prepare"):
        conv.causal_conv1d(layer.x, layer.conv_weight, None, arena.conv, batch)
    for weight in (layer.conv_weight[:6], layer.conv_weight[:, :1]):
        with pytest.raises(ValueError, match=r"kernels\.ssm"):
            conv.causal_conv1d(layer.x, weight, None, arena.conv, conv.prepare(batch))
    assert CausalConv1d.why_not(Capabilities("cpu", "bfloat16")) == "no CUDA device"

    def causal_conv1d_update(x: Any, conv_state: Any, weight: Any, bias: Any, activation: Any) -> Any:
        """As it was before it knew slots."""

    install(monkeypatch, "causal_conv1d", causal_conv1d_fn, causal_conv1d_update)
    assert "1.5" in str(CausalConv1d.why_not(CUDA))
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    assert CausalConv1d.why_not(CUDA) == "causal-conv1d is not installed"


def test_auto_takes_none(flash: FlashAttn, mamba: MambaSSM, conv: CausalConv1d) -> None:
    """A row's bits would depend on its company, or on what the package does with it."""
    for op in ("attention", "ssm"):
        assert select(op, "auto", CUDA).name == "triton"
