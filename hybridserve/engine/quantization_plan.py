"""What of a model is quantized, how, and how that is computed: the plan's part about weights' formats.

Knows names of modules and their sizes; knows no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridserve.quant.unquantized import UnquantizedFormat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hybridserve.layers.context import BuildContext
    from hybridserve.layers.weights import CheckpointTensor
    from hybridserve.quant.format import WeightFormat
    from hybridserve.quant.policy import Quantization


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """Kinds are last parts of names: `in_proj` stands for the in_proj of every layer."""

    quantization: Quantization
    share: float
    """Of the model's parameters, that are quantized."""
    quantized_kinds: tuple[str, ...]
    kept_kinds: tuple[str, ...]
    """Projections that are not."""
    note: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.quantization.format,
            "targets": list(self.quantization.targets),
            "quantized_by": "the checkpoint" if self.quantization.stored else "loading",
            "share": round(self.share, 4),
            "quantized": list(self.quantized_kinds),
            "kept": list(self.kept_kinds),
            "note": self.note,
        }

    def rows(self) -> list[tuple[str, str]]:
        """For `EnginePlan.table`."""
        when = "as the checkpoint is" if self.quantization.stored else "while loading"
        how = f"{self.quantization.format} {when}, {self.share:.1%} of the parameters; {self.note}"
        return [("quantization", how), ("", self.kinds)]

    @property
    def kinds(self) -> str:
        """What is quantized and what is not, as text."""
        kept = f"; kept: {', '.join(self.kept_kinds)}" if self.kept_kinds else ""
        return f"{', '.join(self.quantized_kinds)}{kept}"


def plan_quantization(contexts: Sequence[BuildContext], *, here: bool = True) -> QuantizationPlan | None:
    """Of a model whose stages were just built, `here` for this machine's backends; None if nothing of it is
    quantized. ValueError for a target that names nothing, and for a checkpoint's that all do."""
    tensors: dict[str, CheckpointTensor] = {}
    chosen: dict[str, WeightFormat] = {}
    of_experts: set[str] = set()
    for context in contexts:
        tensors |= context.weights.tensors
        chosen |= context.formats.formats
        of_experts |= context.formats.of_experts
    contexts[0].formats.check_targets(chosen, tensors)
    quantized = {name: kind for name, kind in chosen.items() if kind.name != UnquantizedFormat.name}
    wanted = contexts[0].formats.quantization
    if not quantized:
        if wanted.stored:
            listed = ", ".join(map(repr, wanted.targets))
            raise ValueError(
                f"{wanted.origin}: no module of this model is quantized by its targets {listed}, less what "
                "it ignores"
            )
        return None
    num_quantized = sum(tensors[f"{name}.weight"].num_elements for name in quantized)
    how = next(iter(quantized.values())).note(
        projections=bool(quantized.keys() - of_experts), experts=bool(quantized.keys() & of_experts)
    )
    return QuantizationPlan(
        wanted,
        num_quantized / sum(context.weights.num_parameters for context in contexts),
        _kinds(quantized.keys()),
        _kinds(chosen.keys() - quantized.keys()),
        how if here else "how it is computed there is not known",
    )


def _kinds(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({".".join(_last_parts(name)) for name in names}))


def _last_parts(name: str) -> list[str]:
    """model.layers.3.feed_forward.experts.0.up_proj -> experts, up_proj"""
    parts = name.split(".")
    return [parts[-3], parts[-1]] if len(parts) > 2 and parts[-2].isdigit() else parts[-1:]
