"""A GPU that computes nothing: every tensor on it has a shape, a dtype and a device, and no content.

What runs over it can't look at a number there, nor mix it with a tensor of the host's, nor copy between the
two otherwise than from and to pinned memory without waiting: whoever does fails. So what is shown is that a
step never waits for the device, and that all of it is on the device; not that any number is right.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from hybridserve.engine import gpus, model_runner, worker
from hybridserve.engine.device_queue import DeviceQueue, Mark
from hybridserve.engine.gpus import GPU
from hybridserve.engine.graphs import Recorder
from hybridserve.engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

DEVICE = torch.device("cuda", 0)

MOST_PROGRAMS = 65535
"""Along the second and third axis of a grid."""

ADDRESS = 1 << 20
"""At which every allocation pretends to begin."""

aten = torch.ops.aten

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}

UNRECORDABLE = {aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique2}


class WaitsError(AssertionError):
    """Something waits for the device, or reads what may have changed before it is read."""


class FakeGPU:
    """The device, and what was done with it. `is_strict`: copies from memory that isn't pinned are refused,
    as they wait; else, at start-up, nobody minds."""

    def __init__(self) -> None:
        self.is_strict = False
        self.is_recording = False
        self.lock = threading.RLock()
        """Fake tensors are one thread's at a time."""
        self.launched: list[str] = []
        """Names of kernels."""
        self.pinned: dict[int, torch.Tensor] = {}
        """By the address of the storage; kept, so that nobody else gets it."""

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        self.pinned[host.untyped_storage().data_ptr()] = host
        return host

    def is_pinned(self, host: torch.Tensor) -> bool:
        return not isinstance(host, FakeTensor) and host.untyped_storage().data_ptr() in self.pinned

    def launch(self, name: str, grid: Any, arguments: tuple[Any, ...]) -> None:
        """Instead of a Triton kernel."""
        sizes = tuple(grid({}) if callable(grid) else grid)
        assert all(0 < size <= MOST_PROGRAMS for size in sizes[1:]), f"{name}: a grid of {sizes}"
        assert 0 < sizes[0] < 2**31, f"{name}: a grid of {sizes}"
        for place, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                assert argument.device == DEVICE, f"{name}: argument {place} is on {argument.device}"
        self.launched.append(name)


class Watch(TorchDispatchMode):
    """Sees every operation before it is imitated."""

    def __init__(self, gpu: FakeGPU, *, may_wait: bool = False) -> None:
        super().__init__()
        self._gpu = gpu
        self._may_wait = may_wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._gpu.lock:
            return self._imitate(func, args, kwargs or {})

    def _imitate(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet = func.overloadpacket
        if func.namespace == "aten" and func.has_kernel_for_dispatch_key(
            COMPOSITE
        ):  # in inference mode they come as they were called
            with self:
                return func.decompose(*args, **kwargs)
        if not _is_on_device((args, kwargs)):  # nothing but the host's: computed as ever
            with _disable_current_modes():
                result = func(*args, **{**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs)
            return self._gpu.pin(result) if kwargs.get("pin_memory") else result
        if packet is aten.copy_ and args[0].device != args[1].device:
            non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            self._check(args[1], args[0], non_blocking=non_blocking, name=str(func))
            if args[0].device.type == "cpu":  # what arrives there is zero
                with _disable_current_modes():
                    return args[0].zero_()
        if packet is aten._to_copy and kwargs.get("device") not in (None, args[0].device):
            self._check(
                args[0], kwargs["device"], non_blocking=bool(kwargs.get("non_blocking")), name=str(func)
            )
        if packet in INDEXED and args[0].device.type == "cuda":
            for index in args[1]:
                if index is not None and index.device.type != "cuda":
                    raise WaitsError(f"{func}: an index on the host")
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise WaitsError(f"{func}: a mask has to be counted")
        if packet in UNRECORDABLE and args[0].device.type == "cuda":
            raise WaitsError(f"{func} waits for the device")
        return func(*args, **kwargs)

    def _check(self, source: torch.Tensor, target: Any, *, non_blocking: bool, name: str) -> None:
        """Whether a copy between the two may be queued now."""
        gpu = self._gpu
        on_host = [x for x in (source, target) if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        if gpu.is_recording:
            raise WaitsError(f"{name}: a recording copies from or to the host")
        if self._may_wait or not gpu.is_strict:
            return
        if not non_blocking:
            raise WaitsError(f"{name} waits for the device")
        if not on_host or not all(map(gpu.is_pinned, on_host)):
            raise WaitsError(f"{name} copies from or to memory that is not pinned")


def _is_on_device(arguments: Any) -> bool:
    return any(
        isinstance(leaf, FakeTensor) or (isinstance(leaf, torch.device) and leaf.type == "cuda")
        for leaf in tree_leaves(arguments)
    )


class FakeQueue(DeviceQueue):
    """Whose work is done at once, as there is none."""

    device = DEVICE

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu

    def mark(self) -> Mark:
        return _Now()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        with _disable_current_modes():
            return self._gpu.pin(torch.empty(num_bytes, dtype=torch.uint8))

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device == DEVICE
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)


class _Now(Mark):
    def wait(self) -> None:
        return

    def seconds_since(self, earlier: Mark) -> float:
        return 0.0


class FakeRecorder(Recorder):
    """Of graphs: what can't be recorded on a GPU fails. A replay launches nothing."""

    def __init__(self, gpu: FakeGPU) -> None:
        self._gpu = gpu
        self.num_replays = 0

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        self._gpu.is_recording = True
        try:
            call()
        finally:
            self._gpu.is_recording = False
        return self._replay

    def _replay(self) -> None:
        self.num_replays += 1


@contextlib.contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """An H200 that is not there, which engines that are started meanwhile run on."""
    gpu = FakeGPU()
    memory = 140 * 2**30
    monkeypatch.setattr(gpus, "find_gpu", lambda: GPU("NVIDIA H200", memory, memory, 1))
    monkeypatch.setattr(worker, "rank_device", lambda kind, local_rank: DEVICE)
    monkeypatch.setattr(worker, "CUDARecorder", lambda device: FakeRecorder(gpu))
    monkeypatch.setattr(model_runner, "queue_of", lambda device: FakeQueue(gpu))
    _patch_torch(gpu, monkeypatch)
    _patch_triton(gpu, monkeypatch)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    stage = Worker.stage_adapter

    def stage_adapter(*arguments: Any) -> Any:
        """On a thread of its own, which modes have to be told, and which may wait."""
        with fake, Watch(gpu, may_wait=True):
            return stage(*arguments)

    monkeypatch.setattr(Worker, "stage_adapter", stage_adapter)
    with fake, Watch(gpu):
        yield gpu


def _patch_torch(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that look for the device before any mode is asked, and some that only a GPU has."""
    take, assign = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return torch.ops.aten.copy_.default(self, source, non_blocking)

    def getitem(self: torch.Tensor, index: Any) -> torch.Tensor:
        return take(self, index) if self.device.type != "cuda" else _indexed(self, index)

    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        if self.device.type != "cuda":
            assign(self, index, value)
            return
        view, indices = _basic_part(self, index)
        if not isinstance(value, torch.Tensor):
            value = torch.full((), value, dtype=self.dtype, device=DEVICE)
        if indices:
            view.index_put_(indices, value)
        else:
            copy_(view, value)

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return gpu.pin(self.clone())

    data_ptr = torch.Tensor.data_ptr

    def address(self: torch.Tensor) -> int:
        if not isinstance(self, FakeTensor):
            return data_ptr(self)
        return ADDRESS + self.storage_offset() * self.element_size()

    def index_put_(self: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False) -> Any:
        return aten.index_put_.default(self, list(indices), values, accumulate)

    monkeypatch.setattr(torch.Tensor, "__invert__", lambda self: aten.bitwise_not.default(self))
    monkeypatch.setattr(
        torch.Tensor, "gather", lambda self, axis, index: aten.gather.default(self, axis, index)
    )
    monkeypatch.setattr(torch, "searchsorted", aten.searchsorted.Tensor)
    monkeypatch.setattr(torch.Tensor, "index_put_", index_put_)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch.Tensor, "__getitem__", getitem)
    monkeypatch.setattr(torch.Tensor, "__setitem__", setitem)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "data_ptr", address)


def _basic_part(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """A view of x, as far as numbers, slices, None and ... make one, and indices into it; none: it is all."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        num_axes = sum(part is not None for part in parts) - 1
        parts[place : place + 1] = [slice(None)] * (x.dim() - num_axes)
    indices: list[torch.Tensor | None] = []
    for part in parts:
        axis = len(indices)
        if part is None:
            x = aten.unsqueeze.default(x, axis)
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, axis, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor):
            indices.append(part)
            continue
        else:
            x = aten.select.int(x, axis, int(part))
            continue
        indices.append(None)
    return x, indices if any(each is not None for each in indices) else []


def _indexed(x: torch.Tensor, index: Any) -> torch.Tensor:
    view, indices = _basic_part(x, index)
    result: torch.Tensor = aten.index.Tensor(view, indices) if indices else view
    return result


def _patch_triton(gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        gpu.launch(self.fn.__name__, grid, (*arguments, *options.values()))

    monkeypatch.setattr(InterpretedFunction, "run", run)
