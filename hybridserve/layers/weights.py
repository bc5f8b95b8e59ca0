"""What a model expects of its checkpoint: which tensors, in which shape, and where each one lands.

Layers fill it while they are built; `models.weights` empties files into it. Knows names and shapes; knows no
file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hybridserve.kernels.gemm.interface import ScaledWeight


class CheckpointTensor(NamedTuple):
    """One tensor that a checkpoint may hold."""

    shape: tuple[int, ...]
    """Of the whole model, whatever share of it this rank keeps."""
    load: Callable[[torch.Tensor], None]
    """Copies this rank's share to where it belongs."""
    covers: tuple[str, ...]
    """What is loaded by it. Usually its own name; another spelling of a name covers that name; one that adds
    nothing covers nothing. A tensor [E, n rows, in] that holds others [rows, in] stacked covers those: all E
    of the first rows, then all E of the next."""
    last: bool = False
    """Load after all others, because `load` looks at them."""
    load_scaled: Callable[[ScaledWeight], None] | None = None
    """The same for a tensor that is quantized in the checkpoint; None: it must be plain."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class ModelWeights:
    """All weights of a model, by the name that a checkpoint gives them.

    num_parameters: of the whole model, each counted once.
    num_active_parameters: those that a token reads on average, the input embedding apart.
    num_bytes: what this rank allocates for its share.

    A stage of a pipeline counts and expects what is its own; modules of other stages are `skipped`.
    """

    tensors: dict[str, CheckpointTensor] = field(default_factory=dict)
    finishers: list[Callable[[], None]] = field(default_factory=list)
    """Called once, in order, when everything has been loaded."""
    skipped: list[str] = field(default_factory=list)
    """Modules whose tensors a checkpoint may hold, and which are none of this rank's business."""
    num_parameters: int = 0
    num_active_parameters: float = 0
    num_bytes: int = 0

    def expect(
        self,
        name: str,
        shape: tuple[int, ...],
        load: Callable[[torch.Tensor], None],
        *,
        active: float = 1.0,
        load_scaled: Callable[[ScaledWeight], None] | None = None,
        counted: bool = True,
    ) -> None:
        """A tensor that must be loaded; `active` is the share of it that a token reads on average. One that
        another stage has too is `counted` there."""
        self._add(name, CheckpointTensor(shape, load, (name,), load_scaled=load_scaled))
        if not counted:
            return
        self.num_parameters += math.prod(shape)
        self.num_active_parameters += math.prod(shape) * active

    def accept(
        self,
        name: str,
        shape: tuple[int, ...],
        load: Callable[[torch.Tensor], None],
        *,
        covers: tuple[str, ...],
        last: bool = False,
    ) -> None:
        """A tensor that a checkpoint may hold instead of those it covers."""
        self._add(name, CheckpointTensor(shape, load, covers, last))

    def skip(self, *modules: str) -> None:
        """Leave modules to other stages, with all that is in them."""
        self.skipped += modules

    def skips(self, name: str) -> bool:
        """Whether a tensor is in one of those."""
        return any(name.startswith(f"{module}.") for module in self.skipped)

    def _add(self, name: str, tensor: CheckpointTensor) -> None:
        if name in self.tensors:
            raise ValueError(f"two layers expect the checkpoint's tensor {name!r}")
        self.tensors[name] = tensor
