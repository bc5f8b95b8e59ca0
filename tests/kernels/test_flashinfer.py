"""Attention over FlashInfer, against a stand-in with the package's own signatures."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridserve.kernels.attention import FlashInfer, Reference
from hybridserve.kernels.attention.flashinfer import workspace_bytes
from hybridserve.kernels.registry import Capabilities, select
from tests.harness.packages import install
from tests.harness.triton_interpreter import poisoned  # noqa: F401
from tests.kernels.test_attention import Case, Shape, make_metadata

pytestmark = pytest.mark.usefixtures("poisoned")

CUDA = Capabilities("cuda", "bfloat16")


class Device:
    """What of a GPU FlashInfer's backend asks for, and what is still to be copied to it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.wrappers: list[BatchPrefillWithPagedKVCacheWrapper] = []
        self.pending: set[int] = set()
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132)
        )
        patch.setattr(torch.cuda, "Event", lambda: Event(self))


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.copies: set[int] = set()

    def record(self) -> None:
        self.copies = set(self.device.pending)

    def synchronize(self) -> None:
        self.device.pending -= self.copies


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer 0.2 to 0.6 as its documentation says, with its implementation "fa2"."""

    device: Device

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert (kv_layout, backend, use_cuda_graph) == ("NHD", "fa2", False)
        assert float_workspace_buffer.dtype == torch.uint8
        self.workspace = float_workspace_buffer
        self.num_plans = 0
        self.device.wrappers.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: torch.dtype | str | None = None,
        non_blocking: bool = True,
    ) -> None:
        sums = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert {x.dtype for x in (*sums, paged_kv_indices)} == {torch.int32}
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert sm_scale is not None
        assert head_dim_qk in (64, 128, 256)
        assert id(self) not in self.device.pending, "what it planned before is still to be copied"
        self.device.pending.add(id(self))
        self.num_plans += 1
        self.pages = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.page_size, self.scale, self.window = page_size, sm_scale, window_left
        self.cap = logits_soft_cap or 0.0
        self.dtypes = (q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor:
        """Row by row, by the reference's formula."""
        keys, values = paged_kv_cache
        starts, firsts, pages, last_lens = self.pages
        assert (q.dtype, keys.dtype) == self.dtypes
        assert (q.shape[1], keys.shape[2], q.shape[2]) == self.shape
        assert keys.shape[1] == self.page_size
        assert all(x.stride(-1) == 1 for x in (q, keys, values))
        assert len(q) == starts[-1]
        result = torch.empty_like(q)
        group = q.shape[1] // keys.shape[2]
        for i, last in enumerate(last_lens.tolist()):
            mine = pages[firsts[i] : firsts[i + 1]].long()
            length = (len(mine) - 1) * self.page_size + last
            k, v = (
                x[mine].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (keys, values)
            )
            rows = slice(int(starts[i]), int(starts[i + 1]))
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            behind = torch.arange(length - (rows.stop - rows.start), length)[:, None] - torch.arange(length)
            hidden = (behind < 0) | ((behind > self.window) & (self.window >= 0))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            result[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
        return result


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    numbers = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert {x.dtype for x in numbers} == {torch.int32}
    assert kv_layout == "NHD"
    keys, values = paged_kv_cache
    assert append_key.dtype == append_value.dtype == keys.dtype
    for token, (sequence, position) in enumerate(
        zip(batch_indices.tolist(), positions.tolist(), strict=True)
    ):
        page, offset = divmod(int(kv_indptr[sequence]) * keys.shape[1] + position, keys.shape[1])
        assert page < kv_indptr[sequence + 1]
        keys[kv_indices[page], offset] = append_key[token]
        values[kv_indices[page], offset] = append_value[token]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch, device: Device) -> FlashInfer:
    wrapper = type(
        "BatchPrefillWithPagedKVCacheWrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"device": device}
    )
    install(monkeypatch, "flashinfer", wrapper, append_paged_kv_cache)
    assert FlashInfer.why_not(CUDA) is None
    return FlashInfer()


WIDE = Shape(head_dim=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(
    "lengths",
    [[(0, 5), (7, 1), (6, 9), (0, 1), (12, 2)], [(3, 1), (8, 1)], [(0, 4)], [(4, 1), (7, 1), (0, 5)]],
    ids=["mixed", "decodes", "prompt", "in_runs"],
)
def test_flashinfer_equals_the_reference(
    flashinfer: FlashInfer, lengths: list[tuple[int, int]], window: int | None, softcap: float | None
) -> None:
    ours, expected = Case(lengths, WIDE, 0, poison=1e3), Case(lengths, WIDE, 0, poison=1e3)
    actual = ours.run(flashinfer, window, softcap)
    wanted = expected.run(Reference(), window, softcap)
    torch.testing.assert_close(actual, wanted, atol=2e-2, rtol=2e-2)
    assert torch.equal(ours.arena.bytes(), expected.arena.bytes())


def test_flashinfer_plans_once_a_step(flashinfer: FlashInfer, device: Device) -> None:
    """For all layers of a kind; not before what the last plan left in pinned memory was copied; and again for
    a step that another one has come between."""
    case = Case([(3, 1), (0, 5)], WIDE, 0)
    steps = [flashinfer.prepare(case.metadata()) for _ in range(2)]
    inputs = (case.query, case.key, case.value, case.cache)
    results = []
    for step in (steps[0], steps[0], steps[1], steps[1], steps[0]):
        results += [flashinfer.forward(*inputs, step, scale=0.1, window=window) for window in (None, 4)]
    assert all(torch.equal(result, results[i % 2]) for i, result in enumerate(results))
    assert [wrapper.num_plans for wrapper in device.wrappers] == [3] * 4  # two kinds of layers, of two parts
    assert len({wrapper.workspace.data_ptr() for wrapper in device.wrappers}) == 1


def test_flashinfer_writes_where_the_step_says(flashinfer: FlashInfer) -> None:
    """A token that is computed again belongs to a shared block, and is written to the null block."""
    case = Case([(3, 4)], WIDE, 0, poison=1e3)
    metadata = case.metadata()
    shared = case.arena.bytes().clone()
    metadata.slot_mapping = torch.arange(4) % WIDE.block_size
    case.run_part(flashinfer, slice(None), metadata)
    assert torch.equal(case.cache[0, 0], case.key[: WIDE.block_size])
    changed = (case.arena.bytes() != shared).view(len(case.cache), -1).any(1)
    assert changed.nonzero().flatten().tolist() == [0]


def test_flashinfer_of_nothing_and_of_padding(flashinfer: FlashInfer) -> None:
    case = Case([(3, 1)], WIDE, 0, poison=1e3)
    assert len(case.run_part(flashinfer, slice(0), make_metadata([], [], 4))) == 0
    padded = make_metadata([(3, 1), (0, 1), (0, 1)], [case.tables[0], [0], [0]], 4)
    case.query, case.key, case.value = (torch.cat([x, x, x]) for x in (case.query, case.key, case.value))
    assert case.run_part(flashinfer, slice(None), padded).isfinite().all()


def test_flashinfer_workspace_is_what_splitting_takes() -> None:
    """Jamba 3B's 20 heads of one KV head; fewer heads than the package's own size is for."""
    assert workspace_bytes(20, 128, 132) == 20 * 264 * 128 * 129 * 4
    assert workspace_bytes(1, 256, 132) == 128 << 20


def test_flashinfer_refuses_what_it_can_not_do(
    flashinfer: FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not FlashInfer.can_be_recorded
    assert FlashInfer.head_dims == (64, 128, 256)
    assert "float32" in str(FlashInfer.why_not(Capabilities("cuda", "float32")))
    assert FlashInfer.why_not(Capabilities("cpu", "bfloat16")) == "no CUDA device"
    case = Case([(3, 1)], WIDE, 0)
    inputs = (case.query, case.key, case.value)
    with pytest.raises(TypeError, match="prepare"):
        flashinfer.forward(*inputs, case.cache, case.metadata(), scale=1.0)
    prepared = flashinfer.prepare(case.metadata())
    with pytest.raises(ValueError, match="bfloat16"):
        flashinfer.forward(*inputs, case.cache.float(), prepared, scale=1.0)
    with pytest.raises(ValueError, match="side by side"):
        flashinfer.forward(*inputs, case.cache.repeat(1, 1, 1, 1, 2)[..., ::2], prepared, scale=1.0)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "flashinfer-python" in str(FlashInfer.why_not(CUDA))


@pytest.mark.usefixtures("flashinfer")
def test_auto_does_not_take_it() -> None:
    """A row's bits would depend on its company."""
    pytest.importorskip("triton", reason="triton is not installed")
    assert select("attention", "auto", CUDA).name == "triton"
    assert select("attention", "flashinfer", CUDA).name == "flashinfer"
