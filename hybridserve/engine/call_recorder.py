"""Records what a decode step calls on a CPU, to call it again without the Python around it.

In a small step the layers' Python takes longer than the kernels. What it comes to is a list of calls: of the
C kernels, which take addresses and numbers, and of torch's operations. Both are noted while a step runs, and
all that they allocate comes from a pool of memory that stays, so the list can be called again.

Knows how calls are noted and memory is reused; knows no layer.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hybridserve.engine.graphs import Recorder
from hybridserve.kernels import native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_aten = torch.ops.aten
_UNINITIALIZED = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
)
_READ_BACK = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
}
_READ_PAST_DISPATCH = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_ALIGNMENT = 64
_uses: Callable[[int], int] = torch._C._storage_Use_Count


class CallRecorder(Recorder):
    """One thread records at a time, and replays what it recorded."""

    ahead: ClassVar[bool] = False

    def __init__(self) -> None:
        self._pool = _Pool()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """RuntimeError where the host reads what was computed: another time it might decide otherwise."""
        thread = threading.get_ident()
        calls: list[Callable[[], Any]] = []

        def note(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread:
                calls.append(partial(function, *arguments))

        with native.noting(note), _NoReads(), _Mode(calls, self._pool):
            call()

        def replay() -> None:
            for each in calls:
                each()

        return replay

    @property
    def num_bytes(self) -> int:
        """Of what recordings allocate."""
        return self._pool.num_bytes

    def clear(self) -> None:
        for block in self._pool.blocks:
            block.memory.zero_()


class _Block:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._kept: list[weakref.ref[torch.Tensor]] = []

    def keep(self, alias: torch.Tensor) -> None:
        """A recorded call holds this tensor of it, as long as there is the recording."""
        self._kept.append(weakref.ref(alias))

    @property
    def is_free(self) -> bool:
        """Whether nobody who might still read it holds a tensor of it: the step that is being recorded frees
        what it no longer needs, as it does when it runs."""
        self._kept = [each for each in self._kept if each() is not None]
        return _uses(self.memory.untyped_storage()._cdata) == _IDLE_USES + len(self._kept)


_IDLE_USES = 2
"""By the block's own tensor and by who asks."""


class _Pool:
    """Memory for what recorded calls allocate. A block is given again once the step has let go of it: calls
    are repeated in the order in which they were recorded, by one recording at a time."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self._by_address: dict[int, _Block] = {}

    @property
    def num_bytes(self) -> int:
        return sum(block.memory.numel() for block in self.blocks)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of this shape, dtype and these strides, with any content."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * step for size, step in steps)
        block = self._take(max(num_elements * tensor.element_size(), 1))
        flat = block.memory[: num_elements * tensor.element_size()].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """An alias that a recorded call may hold for good."""
        block = self._by_address.get(_address(tensor))
        if block is None:
            return tensor
        alias = tensor.detach()
        block.keep(alias)
        return alias

    def _take(self, num_bytes: int) -> _Block:
        fitting = [block for block in self.blocks if block.memory.numel() >= num_bytes and block.is_free]
        if fitting:
            return min(fitting, key=lambda block: block.memory.numel())
        block = _Block(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        self.blocks.append(block)
        self._by_address[_address(block.memory)] = block
        return block


class _NoReads(TorchFunctionMode):
    """Refuses what hands out content without an operation that torch dispatches."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ_PAST_DISPATCH:
            raise RuntimeError(f"the host reads what was computed ({func.__name__})")
        return func(*args, **(kwargs or {}))


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch, in this thread."""

    def __init__(self, calls: list[Callable[[], Any]], pool: _Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self._pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READ_BACK:
            raise RuntimeError(f"the host reads what was computed ({func})")
        result = func(*args, **kwargs)
        if func in _UNINITIALIZED:
            return self._pool.like(result)
        if func._schema.is_mutable:
            self._calls.append(partial(func, *self._kept(args), **self._kept(kwargs)))
            return result
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        outputs, spec = tree_flatten(result)
        if all(not isinstance(each, torch.Tensor) or _address(each) in given for each in outputs):
            return result  # views
        return self._into_pool(func, args, kwargs, outputs, spec)

    def _into_pool(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[torch.Tensor],
        spec: Any,
    ) -> Any:
        """Has the operation write its results into the pool, now and whenever it is repeated."""
        places = [self._pool.like(each) for each in outputs]
        for place, output in zip(places, outputs, strict=True):
            place.copy_(output)
        targets = [self._pool.keep(place) for place in places]
        args, kwargs = self._kept(args), self._kept(kwargs)
        if (writing := _writing_variant(func, len(targets))) is not None:
            names = (argument.name for argument in writing._schema.arguments if argument.is_out)
            self._calls.append(partial(writing, *args, **kwargs, **dict(zip(names, targets, strict=True))))
        else:
            self._calls.append(partial(_repeat, func, args, kwargs, targets))
        return tree_unflatten(places, spec)

    def _kept(self, arguments: Any) -> Any:
        return tree_map_only(torch.Tensor, self._pool.keep, arguments)


def _repeat(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[torch.Tensor]
) -> None:
    for target, output in zip(targets, tree_leaves(func(*args, **kwargs)), strict=True):
        target.copy_(output)


def _writing_variant(func: Any, num_outputs: int) -> Any:
    """The overload that takes the same arguments and where to write, if there is one."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for overload in _overloads(func.overloadpacket):
        arguments = overload._schema.arguments
        others = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if others == wanted and len(arguments) - len(others) == num_outputs:
            return overload
    return None


def _overloads(packet: Any) -> Iterator[Any]:
    return (getattr(packet, name) for name in packet.overloads())


def _address(tensor: torch.Tensor) -> int:
    """Of its storage; 0 for an opaque one, such as a weight that oneDNN has packed."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
