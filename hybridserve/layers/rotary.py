"""Rotary position embeddings (arXiv 2104.09864) and the ways in which checkpoints stretch them.

Knows frequencies; does not know heads or caches. Rotated keys are cached, so a rotation may depend on nothing
but the position: where a scaling depends on the length of a sequence, the length that is served is what
counts, for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [T, 1, rotary_dim / 2]."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """`rope_parameters` of a config (or, before transformers 5, `rope_theta` and `rope_scaling`), completed.

    max_length is the longest sequence served; rotary_dim is the part of a head that is rotated.
    """

    type: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    max_length: int
    parameters: Mapping[str, Any]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, max_length: int
    ) -> RopeScaling:
        """Raises ValueError, naming the field, for an unknown type and for a value that makes no sense."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
            raise ValueError("config.json: rope_parameters must be one set of numbers for all layers")
        parameters = dict(given)
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in FREQUENCIES:
            known = ", ".join(sorted(FREQUENCIES))
            raise ValueError(f"config.json: rope_parameters.rope_type: {kind!r} is not supported ({known})")
        for key in ("rope_theta", "partial_rotary_factor"):
            parameters.setdefault(key, config.get(key))
        if config.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = config["original_max_position_embeddings"]
        parameters.setdefault("original_max_position_embeddings", max_position_embeddings)
        theta = _number(parameters, "rope_theta", 10_000.0)
        rotary_dim = int(head_dim * _number(parameters, "partial_rotary_factor", 1.0))
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"config.json: {rotary_dim} of the {head_dim} dimensions of a head can't be rotated"
            )
        return cls(kind, theta, rotary_dim, max_position_embeddings, max_length, parameters)

    def number(self, key: str, default: float | None = None) -> float:
        return _number(self.parameters, key, default)

    def factors(self, key: str) -> torch.Tensor:
        values = self.parameters.get(key)
        if not isinstance(values, list) or len(values) != self.rotary_dim // 2:
            raise ValueError(
                f"config.json: rope_parameters.{key} must be a list of {self.rotary_dim // 2} numbers"
            )
        return torch.tensor(values, dtype=torch.float32)


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"config.json: rope_parameters.{key}: {value!r} is not a number above 0")
    return float(value)


def _powers(scaling: RopeScaling, theta: float | None = None) -> torch.Tensor:
    """theta^(2i / d) for i in 0 .. d / 2: the wavelengths over 2 pi."""
    exponents = torch.arange(0, scaling.rotary_dim, 2, dtype=torch.float32) / scaling.rotary_dim
    return (scaling.theta if theta is None else theta) ** exponents


def _default(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(scaling), 1.0


def _linear(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    return 1.0 / _powers(scaling) / scaling.number("factor"), 1.0


def _dynamic(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """NTK-aware: a larger base where sequences outgrow the trained length."""
    factor, dim, trained = scaling.number("factor"), scaling.rotary_dim, scaling.max_position_embeddings
    stretch = factor * max(scaling.max_length, trained) / trained - (factor - 1)
    return 1.0 / _powers(scaling, scaling.theta * stretch ** (dim / (dim - 2))), 1.0


def _yarn(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """arXiv 2309.00071: short wavelengths stay, long ones are interpolated, a ramp lies between."""
    dim, trained = scaling.rotary_dim, scaling.number("original_max_position_embeddings")
    factor = scaling.number("factor", scaling.max_position_embeddings / trained)

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(scaling.theta))

    low, high = dimension(scaling.number("beta_fast", 32)), dimension(scaling.number("beta_slow", 1))
    if scaling.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = _powers(scaling)
    frequencies = interpolated / (factor * powers) + (1 - interpolated) / powers
    return frequencies, scaling.number("attention_factor", _yarn_attention_factor(scaling, factor))


def _yarn_attention_factor(scaling: RopeScaling, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.parameters.get("mscale") and scaling.parameters.get("mscale_all_dim"):
        return mscale(scaling.number("mscale")) / mscale(scaling.number("mscale_all_dim"))
    return mscale(1.0)


def _longrope(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """arXiv 2402.13753: one list of factors for the trained length, another for what is longer."""
    trained = scaling.number("original_max_position_embeddings")
    factor = scaling.number("factor", scaling.max_position_embeddings / trained)
    default = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    long, short = scaling.factors("long_factor"), scaling.factors("short_factor")
    frequencies = 1.0 / ((long if scaling.max_length > trained else short) * _powers(scaling))
    return frequencies, scaling.number("attention_factor", default)


def _llama3(scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    """Wavelengths above trained / low_freq_factor are stretched, below trained / high_freq_factor not."""
    trained, factor = scaling.number("original_max_position_embeddings"), scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    frequencies = 1.0 / _powers(scaling)
    smooth = (trained * frequencies / (2 * math.pi) - low) / (high - low)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


FREQUENCIES: Mapping[str, Callable[[RopeScaling], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}


class RotaryEmbedding:
    """positions [T] -> the rotation of each, computed once a step for all layers."""

    def __init__(self, scaling: RopeScaling, dtype: torch.dtype, device: torch.device) -> None:
        frequencies, self.attention_factor = FREQUENCIES[scaling.type](scaling)
        self.frequencies = frequencies.to(device)
        self.dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        angles = torch.outer(positions.float(), self.frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos.to(self.dtype), sin.to(self.dtype)
