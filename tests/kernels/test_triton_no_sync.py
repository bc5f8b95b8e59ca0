"""No Triton backend waits for the device: nothing on it is looked at, so that a step can be queued ahead.

Copies to the host, which tensors that lie there don't show, are found by `tools/compile_kernels.py`: its
tensors hold nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridserve.kernels import attention, gemm, lora, moe, pointwise, ssm
from tests.harness.triton_interpreter import poisoned, require_triton  # noqa: F401
from tests.kernels import test_attention, test_lora, test_moe, test_pointwise, test_scaled, test_ssm

if TYPE_CHECKING:
    from collections.abc import Callable

require_triton()

pytestmark = pytest.mark.usefixtures("poisoned")

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
"""What gives a number to the host, or a tensor whose size only the device knows."""


class Queued(TorchDispatchMode):
    """Fails on a call that would wait for a device, if there were one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        assert not masks, f"{func} with a mask waits for the device"
        return func(*args, **(kwargs or {}))


def attend() -> None:
    case = test_attention.Case([(0, 5), (9, 1), (3, 2)], test_attention.Shape(), 0)
    metadata = case.metadata()
    with Queued():
        case.run_part(attention.Triton(), slice(None), metadata, 3)


def recur() -> None:
    layer, arena = test_ssm.Layer.random(5), test_ssm.Arena.random(0)
    batch = test_ssm.batch_of([1, 3, 1], [4, 2, 0], [True, False, False])
    with Queued():
        layer.run(ssm.Triton(), arena, batch)


def project() -> None:
    for kind in test_scaled.KINDS:
        weight, x = test_scaled.scaled(7, 20, kind=kind), test_scaled.random(3, 20)
        with Queued():
            gemm.Triton().linear(x, weight, x[0, :7])


def mix() -> None:
    (x, logits), weights = test_moe.tokens(3), test_moe.expert_weights()
    backend = moe.Triton()
    with Queued():
        backend.experts(x, *backend.route(logits, 2, renormalize=True), *backend.pack(*weights))


def adapt() -> None:
    table, batch = test_lora.make_table(20, (9,), torch.float32), test_lora.batch_of([3, 0, 1])
    x, y = test_lora.random(0, 3, 20), test_lora.random(1, 3, 9)
    with Queued():
        lora.Triton().add(y, x, table, batch)


def on_rows() -> None:
    backend, x, probs = pointwise.Triton(), torch.ones(3, 8), test_pointwise.distributions(3, 9)
    top_k, top_p = torch.tensor([0, 2, 20]), torch.tensor([1.0, 0.3, 0.9])
    with Queued():
        backend.rms_norm(x, x[0], 1e-3, (5, 3))
        backend.add_rms_norm(x, x.clone(), x[0].clone(), 1e-3)
        backend.silu_and_mul(x)
        backend.rotate(x.view(3, 2, 4), x[:, None, :2], x[:, None, :2])
        backend.keep_top_k(probs, top_k)
        backend.keep_top_p(probs, top_p)


@pytest.mark.parametrize("call", [attend, recur, project, mix, adapt, on_rows])
def test_nothing_on_the_device_is_looked_at(call: Callable[[], None]) -> None:
    call()


def test_the_watch_sees_what_waits() -> None:
    x = torch.arange(3)
    for waits in (lambda: int(x[0]), lambda: x[x > 1], x.nonzero, lambda: bool(x[1])):
        with pytest.raises(AssertionError, match="waits"), Queued():
            waits()
