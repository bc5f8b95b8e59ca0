"""Records what a decode step calls on a CPU, to call it again without the Python around it.

In a small step the layers' Python takes longer than the kernels. What it comes to is a list of calls: of the
C kernels, which take addresses and numbers, and of torch's operations. Both are noted while a step runs, and
all that they allocate comes from a pool of memory that stays, so the list can be called again.

Knows how calls are noted and memory is reused; knows no layer. What it can't see are addresses of other
memory: a C kernel may be given those of tensors that outlive the recording, and of what is made meanwhile,
but for arrays of NumPy.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from hybridserve.engine.graphs import OnDemandRecorder
from hybridserve.kernels import native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_aten = torch.ops.aten
_UNINITIALIZED = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
)
_NOT_REPEATABLE = {
    torch.Tag.data_dependent_output: "the host reads what was computed",
    torch.Tag.dynamic_output_shape: "the shape of a result depends on what was computed",
}
_READ_PAST_DISPATCH = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_SMALLEST_BLOCK = 64
_uses: Callable[[int], int] = torch._C._storage_Use_Count


class CallRecorder(OnDemandRecorder):
    """Recordings are made and replayed by one thread, one at a time. Several recorders know nothing of each
    other."""

    def __init__(self) -> None:
        self._pool = _Pool()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """RuntimeError where the host reads what was computed, as it might decide otherwise another time, or
        an operation can't be repeated in the same memory."""
        recording = _Recording(self._pool)

        def note(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            recording.calls.append(partial(function, *arguments))

        with native.noting(note), _NoReads(), _Mode(recording):
            call()
        return recording.replay

    @property
    def num_bytes(self) -> int:
        """Of what recordings allocate, for as long as one of them is kept."""
        return sum(block.num_bytes for block in self._pool.blocks)

    def clear(self) -> None:
        for block in self._pool.blocks:
            block.memory.zero_()


class _Block:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
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
    are repeated in the order in which they were recorded, by one recording at a time. It lasts as long as a
    recording that has used it."""

    def __init__(self) -> None:
        self._by_address: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()

    @property
    def blocks(self) -> list[_Block]:
        return list(self._by_address.values())

    def of(self, tensor: torch.Tensor) -> _Block | None:
        """The block that a tensor lies in; None: in other memory."""
        return self._by_address.get(_address(tensor))

    def take(self, num_bytes: int) -> _Block:
        """Powers of two: a recording of some more sequences than another finds room in its blocks."""
        fitting = [block for block in self.blocks if block.num_bytes >= num_bytes and block.is_free]
        if fitting:
            return min(fitting, key=lambda block: block.num_bytes)
        block = _Block(max(1 << (num_bytes - 1).bit_length(), _SMALLEST_BLOCK))
        self._by_address[_address(block.memory)] = block
        return block


class _Recording:
    def __init__(self, pool: _Pool) -> None:
        self.calls: list[Callable[[], Any]] = []
        self._pool = pool
        self._blocks: set[_Block] = set()
        """That calls have addresses of."""

    def replay(self) -> None:
        for call in self.calls:
            call()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of this shape, dtype and these strides, with any content."""
        if tensor.layout is not torch.strided:
            raise RuntimeError(f"a result is laid out as {tensor.layout}")
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        num_elements = 0 if tensor.numel() == 0 else 1 + sum((size - 1) * step for size, step in steps)
        num_bytes = num_elements * tensor.element_size()
        block = self._pool.take(max(num_bytes, 1))
        self._blocks.add(block)
        return block.memory[:num_bytes].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def kept(self, arguments: Any) -> Any:
        """With aliases of tensors of the pool, which a recorded call may hold for good."""
        return tree_map_only(torch.Tensor, self.keep, arguments)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        block = self._pool.of(tensor)
        if block is None:
            return tensor
        alias = tensor.detach()
        block.keep(alias)
        return alias


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

    def __init__(self, recording: _Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, in seconds, to tell it to leave this class alone."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # what is made of other operations is seen as these
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        _check_repeatable(func, args)
        if func is _aten.lift_fresh.default:  # of numbers of the host, which nobody else keeps
            return self._into_pool(_aten.clone.default, args, kwargs, args[0])
        given = {_place(each) for each in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        if func in _UNINITIALIZED:
            return self._recording.like(result)
        outputs = tree_leaves(result)
        if func._schema.is_mutable:
            if not {_place(each) for each in _tensors((args, kwargs, result))} <= given:
                raise RuntimeError(f"{func} gives a tensor other memory")
            self._recording.calls.append(
                partial(func, *self._recording.kept(args), **self._recording.kept(kwargs))
            )
            return result
        if all(isinstance(each, torch.Tensor) and _place(each) in given for each in outputs):
            return result  # views
        return self._into_pool(func, args, kwargs, result)

    def _into_pool(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Has the operation write its results into the pool, now and whenever it is repeated."""
        outputs, spec = tree_flatten(result)
        if not all(isinstance(each, torch.Tensor) for each in outputs):
            raise RuntimeError(f"{func} has results that are no tensors")
        recording = self._recording
        places = [recording.like(each) for each in outputs]
        for place, output in zip(places, outputs, strict=True):
            place.copy_(output)
        targets = [recording.keep(place) for place in places]
        args, kwargs = recording.kept(args), recording.kept(kwargs)
        if func is _aten._to_copy.default:  # no variant of it takes a dtype
            recording.calls.append(partial(_aten.copy_.default, *targets, args[0]))
        elif (writing := _writing_variant(func, len(targets))) is not None:
            names = (argument.name for argument in writing._schema.arguments if argument.is_out)
            recording.calls.append(
                partial(writing, *args, **kwargs, **dict(zip(names, targets, strict=True)))
            )
        else:
            recording.calls.append(partial(_repeat, func, args, kwargs, targets))
        return tree_unflatten(places, spec)


def _check_repeatable(func: Any, args: tuple[Any, ...]) -> None:
    """RuntimeError for an operation that is another one with another content."""
    for tag, reason in _NOT_REPEATABLE.items():
        if tag in func.tags and not (func is _aten.index.Tensor and _picks_by_number(args[1])):
            raise RuntimeError(f"{reason} ({func})")


def _picks_by_number(indices: Sequence[torch.Tensor | None]) -> bool:
    """Rather than by a mask."""
    return all(each is None or each.dtype in (torch.int32, torch.int64) for each in indices)


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


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Of its storage: the address and bytes, or for an opaque one, such as a weight that oneDNN has packed,
    which tensor it is."""
    if tensor.layout is not torch.strided:
        return id(tensor), -1
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _address(tensor: torch.Tensor) -> int:
    return _place(tensor)[0]
