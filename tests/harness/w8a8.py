"""transformers as the oracle of W8A8: float weights that are codes times scales, and the input of every
quantized product rounded by a rule that is written down here once more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Rule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """x [..., in] -> the places of its elements between whole numbers, and the numbers that they become."""

EDGE = 3e-5
"""So near to the middle between two whole numbers, sums in another order may be rounded to the other one."""


def absmax_127(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """docs/quantization.md: a row's largest magnitude becomes 127; to the nearest, halves to the even one."""
    step = x.abs().amax(-1, keepdim=True) / 127
    places = torch.where(step == 0, 0, x / step)
    return places, places.round() * step


def absmax_255(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors': 256 codes cover twice the largest magnitude, and so 127.5 is clamped to 127."""
    step = x.abs().amax(-1, keepdim=True) * 2 / 255
    places = torch.where(step == 0, 0, x / step)
    return places, places.round().clamp(-128, 127) * step


class Watched:
    """A rule, and whether what it rounded left no doubt."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.forget()

    def forget(self) -> None:
        self.was_near_an_edge = False
        self.num_rounded = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        places, rounded = self._rule(x)
        largest = places.abs().amax(-1, keepdim=True)
        doubtful = ((places - places.floor() - 0.5).abs() < EDGE) & (places.abs() < largest)
        self.was_near_an_edge |= bool(doubtful.any())
        self.num_rounded += x.numel()
        return rounded


def w8a8_oracle(
    path: Path, quantized: Iterable[str], rule: Callable[[torch.Tensor], torch.Tensor]
) -> torch.nn.Module:
    """The checkpoint `path`, whose weights are dequantized; `quantized` are the names of modules."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    modules = dict(model.named_modules())
    names = set(quantized)
    for name, module in modules.items():
        if name in names:
            names.remove(name)
            module.register_forward_pre_hook(lambda _, args: (rule(args[0]), *args[1:]))
        elif f"{name}.0.up_proj" in names and hasattr(module, "gate_up_proj"):
            names -= {each for each in names if each.startswith(f"{name}.")}
            module.forward = _experts(module, rule)
    assert not names, "modules that transformers does not have"
    return model


def _experts(module: Any, rule: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """One token and one expert at a time: transformers keeps experts stacked, without modules to hook."""

    def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for t in range(ids.shape[0]):
            for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
                gate, up = (rule(x[t]) @ module.gate_up_proj[expert].t()).chunk(2)
                y[t] += weight * (rule(F.silu(gate) * up) @ module.down_proj[expert].t())
        return y

    return forward
