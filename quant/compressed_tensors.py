"""The `compressed-tensors` layout of quantized checkpoints: its `quantization_config`, and how a module's
tensors are named and joined.

Reads int8 (a scale a channel or a tensor; activations as they are, or int8 a token) and float8 weights; what
else the layout can say is refused by name. Knows no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hybridserve.kernels.gemm.interface import ScaledWeight
from hybridserve.quant.format import WeightError
from hybridserve.quant.fp8 import Fp8Format
from hybridserve.quant.int8 import Int8Format, Int8W8A8Format
from hybridserve.quant.policy import Quantization

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METHOD = "compressed-tensors"
CODES = "weight"
PACKED = "weight_packed"
SCALE = "weight_scale"
SHAPE = "weight_shape"
BESIDE = (SCALE, SHAPE, "input_scale")
"""Parts of a module that are not its codes. The last adds nothing: activations are never rounded by a fixed
scale."""

CODE_DTYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
"""How safetensors spells dtypes of codes."""

WRITTEN = {
    Int8Format.name: "int-quantized",
    Int8W8A8Format.name: "int-quantized",
    Fp8Format.name: "float-quantized",
}
"""Format -> what the layout calls the way in which its codes are stored."""

STORED = {
    "int-quantized": ("int",),
    "pack-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    "mixed-precision": ("int", "float"),
}
"""Ways to store codes -> the types that these may have."""

Nothing = Annotated[None, BeforeValidator(lambda value: value or None)]
"""What must not be set; an empty list or mapping is nothing."""


Layout = Literal["int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class _Arguments(_Strict):
    """How weights or activations are rounded. What only concerns how scales were found is left unread."""

    num_bits: Literal[8]
    type: Literal["int", "float"]
    symmetric: Literal[True] = True
    strategy: Literal["tensor", "channel", "token"] | None = None
    dynamic: bool = False
    group_size: Nothing = None
    block_structure: Nothing = None
    actorder: Nothing = None
    observer: Any = None
    observer_kwargs: Any = None
    scale_dtype: Any = None
    zp_dtype: Any = None


class _Group(_Strict):
    targets: Annotated[list[str], Field(min_length=1)]
    weights: _Arguments
    input_activations: _Arguments | None = None
    output_activations: Nothing = None
    format: Layout | None = None


class _Config(_Strict):
    quant_method: Literal["compressed-tensors"]
    config_groups: Annotated[dict[str, _Group], Field(min_length=1)]
    ignore: list[str] = []
    format: Layout | None = None
    quantization_status: Literal["compressed", "frozen"] | None = None
    global_compression_ratio: Any = None
    version: Any = None
    kv_cache_scheme: Nothing = None
    sparsity_config: Nothing = None
    transform_config: Nothing = None


def read_config(config: Mapping[str, Any]) -> Quantization | None:
    """What a checkpoint's config.json says about its quantization; None if it isn't quantized.

    Raises ValueError, with the name, for a scheme that can't be read.
    """
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    where = "config.json: quantization_config"
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {found!r} is not an object")
    method = found.get("quant_method")
    if method != METHOD:
        raise ValueError(f"{where}: quant_method {method!r} is not supported (supported: {METHOD})")
    try:
        parsed = _Config.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {name}: {first['input']!r}: not supported ({first['msg']})") from None
    groups = list(parsed.config_groups.values())
    for name, group in parsed.config_groups.items():
        layout, kind = group.format or parsed.format, group.weights.type
        if layout is not None and kind not in STORED[layout]:
            raise ValueError(f"{where}: config_groups.{name}: {kind} weights, but the format is {layout}")
    formats = {_format(group, f"{where}: config_groups") for group in groups}
    if len(formats) > 1:
        raise ValueError(f"{where}: config_groups: {' and '.join(sorted(formats))} in one checkpoint")
    targets = tuple(target for group in groups for target in group.targets)
    return Quantization(formats.pop(), targets, tuple(parsed.ignore), stored=True)


def _format(group: _Group, where: str) -> str:
    weights, inputs = group.weights, group.input_activations
    scheme = f"{weights.type}8 weights, a scale a {weights.strategy or 'tensor'}"
    if weights.strategy == "token" or weights.dynamic:
        raise ValueError(f"{where}: {scheme}, dynamic {weights.dynamic}: not supported")
    if weights.type == "float" and (inputs is None or inputs.type == "float"):
        return Fp8Format.name
    if weights.type == "int" and inputs is None:
        return Int8Format.name
    if inputs is not None and inputs.type == weights.type and inputs.dynamic and inputs.strategy == "token":
        return Int8W8A8Format.name
    assert inputs is not None
    kind = "dynamic" if inputs.dynamic else "static"
    raise ValueError(
        f"{where}: {scheme}, {kind} {inputs.type}8 activations, a scale a {inputs.strategy}: not supported"
    )


def write_config(format_name: str, ignore: Sequence[str]) -> dict[str, Any]:
    """The quantization_config of a checkpoint written here: every projection but those of `ignore`."""
    kind = "float" if format_name == Fp8Format.name else "int"
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = None
    if format_name == Int8W8A8Format.name:
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "format": WRITTEN[format_name],  # or other readers expect int8 weights to be packed
    }
    return {
        "quant_method": METHOD,
        "format": WRITTEN[format_name],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """`pack-quantized` int8: four codes in an int32 [out, in / 4], each plus 128, the first in the lowest
    byte."""
    return (packed.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the int32 tensor that holds codes of a shape."""
    return (*shape[:-1], -(-shape[-1] // 4))


def join(codes: torch.Tensor, scale: torch.Tensor, scale_name: str) -> ScaledWeight:
    """Codes [out, in] and the scales that a checkpoint has for them: one, [out] or [out, 1].

    WeightError for any other shape, and for scales that are not positive numbers.
    """
    num_rows = len(codes)
    if scale.numel() == 1:
        scales = scale.float().reshape(1).expand(num_rows)
    elif tuple(scale.shape) in ((num_rows,), (num_rows, 1)):
        scales = scale.float().reshape(num_rows)
    else:
        shape = list(scale.shape)
        raise WeightError(
            f"has scales {shape} in {scale_name!r}: only one a row, or one in all, are supported"
        )
    if not scales.is_meta and not (scales.isfinite() & (scales > 0)).all():
        raise WeightError(f"has scales in {scale_name!r} that are NaN, infinite, zero or negative")
    return ScaledWeight(codes, scales)


def resolve(wanted: str, targets: tuple[str, ...] | None, stored: Quantization | None) -> Quantization:
    """What a configuration asks for, given what the checkpoint is. `wanted` is a format's name, or auto: as
    the checkpoint is. ValueError, with the key, where they do not agree."""
    if stored is None:
        if wanted in ("auto", "none"):
            if targets is not None:
                raise ValueError("quantization.targets: has no effect without quantization.format")
            return Quantization()
        return Quantization(wanted, ("all",) if targets is None else targets)
    if wanted not in ("auto", stored.format):
        raise ValueError(
            f"quantization.format: {wanted}, but the checkpoint is quantized already, as {stored.format}"
        )
    if targets is not None:
        raise ValueError("quantization.targets: the checkpoint is quantized already, and says itself what")
    return stored
