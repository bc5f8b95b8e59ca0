"""What of a model is quantized, how, and how that is computed: the plan's part about weights' formats.

Knows names of modules and their sizes; knows no weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridserve.layers.context import BuildContext
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


def plan_quantization(context: BuildContext) -> QuantizationPlan | None:
    """Of a model that was just built; None if nothing of it is quantized. ValueError for a target that names
    nothing."""
    policy, weights = context.formats, context.weights
    policy.check_targets(weights.tensors)
    quantized = {name for name, chosen in policy.formats.items() if chosen is not policy.plain}
    if not quantized:
        return None
    num_quantized = sum(weights.tensors[f"{name}.weight"].num_elements for name in quantized)
    return QuantizationPlan(
        policy.quantization,
        num_quantized / weights.num_parameters,
        _kinds(quantized),
        _kinds(policy.formats.keys() - quantized),
        next(policy.formats[name].note for name in quantized),
    )


def _kinds(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted({".".join(_last_parts(name)) for name in names}))


def _last_parts(name: str) -> list[str]:
    """model.layers.3.feed_forward.experts.0.up_proj -> experts, up_proj"""
    parts = name.split(".")
    return [parts[-3], parts[-1]] if len(parts) > 2 and parts[-2].isdigit() else parts[-1:]
