"""Which format each module has: as the configuration says, or as a checkpoint does that is quantized already.

Layers ask once, while they are built, with the names that their modules have in a checkpoint and the role
that they play. Knows names and roles; knows no model and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hybridserve.quant.patterns import pattern
from hybridserve.quant.unquantized import UnquantizedFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hybridserve.quant.format import WeightFormat

Role = Literal["experts", "mlp", "mixer", "delicate"]
"""What a module does, as far as its precision is concerned. Delicate ones (routers, x_proj, dt_proj, the
output head) are small and steer much: they are quantized only where they are named."""

GROUPS: Mapping[str, frozenset[Role]] = {
    "experts": frozenset({"experts"}),
    "mlp": frozenset({"experts", "mlp"}),
    "all": frozenset({"experts", "mlp", "mixer"}),
}
"""What may be said instead of names -> the roles that it means."""

PATTERN = "re:"
"""What a target begins with that is a pattern."""

_LISTED = 6
"""Names in an error, at most."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A format, and the modules that have it.

    targets: groups, names of modules, whole or from a dot on, and patterns of whole names after `re:`; of a
    checkpoint that is quantized already, also `Linear` (every projection). ignore: the same, of modules that
    are left out. ValueError for a pattern that is not understood.
    """

    format: str = UnquantizedFormat.name
    targets: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    stored: bool = False
    """Whether the checkpoint is quantized already."""

    def __post_init__(self) -> None:
        for target in (*self.targets, *self.ignore):
            if target.startswith(PATTERN):
                try:
                    pattern(target.removeprefix(PATTERN))
                except ValueError as error:
                    raise ValueError(f"{self.origin}: {target!r}: {error}") from None

    @property
    def origin(self) -> str:
        """Who says so, as an error begins."""
        return "config.json: quantization_config" if self.stored else "quantization.targets"

    def selects(self, name: str, role: Role) -> bool:
        if any(_names(target, name) for target in self.ignore):
            return False
        return any(
            role in GROUPS.get(target, ()) or (self.stored and target == "Linear") or _names(target, name)
            for target in self.targets
        )


def _names(target: str, name: str) -> bool:
    if target.startswith(PATTERN):
        return pattern(target.removeprefix(PATTERN)).matches(name)
    return name == target or name.endswith(f".{target}")


class FormatPolicy:
    """Answers layers. `formats` is what it has answered so far: name of a module -> format."""

    def __init__(
        self,
        plain: UnquantizedFormat,
        quantized: WeightFormat | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`quantized` is the format that `quantization` names; without them everything is plain."""
        self.plain = plain
        self.quantization = quantization or Quantization()
        self.formats: dict[str, WeightFormat] = {}
        self.of_experts: set[str] = set()
        """Those of them that are computed by the backend of experts."""
        self._quantized = quantized

    def linear(self, names: Sequence[str], role: Role) -> WeightFormat:
        """The format of a projection that several modules of a checkpoint are merged into. ValueError if only
        some of them are to be quantized."""
        return self._choose(names, [self.quantization.selects(name, role) for name in names])

    def experts(self, name: str, names: Sequence[str]) -> WeightFormat:
        """The same for the experts of one layer, `names`, in the module `name`."""
        self.of_experts.update(names)
        whole = self.quantization.selects(name, "experts") and not self.quantization.stored
        return self._choose(names, [whole or self.quantization.selects(each, "experts") for each in names])

    def check_targets(self, names: Iterable[str], tensors: Iterable[str]) -> None:
        """ValueError for a target that names nothing which can be quantized. To be called when the model is
        built: `names` are those that its layers, of all stages, have asked for, `tensors` all of the
        checkpoint's. What others wrote into a checkpoint may name anything."""
        if self.quantization.stored:
            return
        names = list(names)
        modules = {module for name in names for module in (name, *_parents_of_experts(name))}
        for target in self.quantization.targets:
            if target in GROUPS or any(_names(target, name) for name in modules):
                continue
            stems = {name for tensor in tensors for name in (tensor, tensor.rpartition(".")[0])}
            if any(_names(target, stem) for stem in stems):
                raise ValueError(
                    f"quantization.targets: {target!r} is never quantized: embeddings (and a head tied to "
                    "them), norms, convolutions and the parameters of recurrences stay as they are"
                )
            kinds = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f"quantization.targets: {target!r} names no module of this model; groups are "
                f"{', '.join(GROUPS)}, modules such as {', '.join(kinds)}"
            )

    def _choose(self, names: Sequence[str], selected: Sequence[bool]) -> WeightFormat:
        chosen: WeightFormat = self.plain
        if any(selected):
            assert self._quantized is not None
            chosen = self._quantized
            if not all(selected):
                self._refuse_part(names, selected)
        self.formats.update(dict.fromkeys(names, chosen))
        return chosen

    def _refuse_part(self, names: Sequence[str], selected: Sequence[bool]) -> None:
        inside = [name for name, yes in zip(names, selected, strict=True) if yes]
        rest = [name for name, yes in zip(names, selected, strict=True) if not yes]
        raise ValueError(
            f"{self.quantization.origin}: quantizes {_list(inside)}, which is computed together with "
            f"{_list(rest)}: all of them must be quantized, or none"
        )


def _parents_of_experts(name: str) -> list[str]:
    """model.layers.1.feed_forward.experts.3.up_proj -> model.layers.1.feed_forward.experts"""
    parent, _, _ = name.rpartition(".")
    container, _, index = parent.rpartition(".")
    return [container] if index.isdigit() and container.endswith("experts") else []


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
