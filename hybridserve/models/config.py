"""Reads what a checkpoint says about itself: config.json and generation_config.json.

Knows files and how to refuse a value in one line; which fields there are is each family's business.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Size = Annotated[int, Field(gt=0)]


class FamilyConfig(BaseModel):
    """The fields of config.json that a family of models reads. Sizes have no defaults."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    hidden_act: Literal["silu", "swish"] = "silu"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        """Raises ValueError, naming the field, for one that is missing or that this family can't compute."""
        try:
            return cls.model_validate(config)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or first["msg"]
            if first["type"] == "missing":
                raise ValueError(f"config.json: {name} is missing") from None
            if not first["loc"]:
                raise ValueError(f"config.json: {first['msg'].removeprefix('Value error, ')}") from None
            raise ValueError(f"config.json: {name}: {first['input']!r}: {first['msg']}") from None


def load_hf_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ValueError if it is missing or isn't a JSON object."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json there, so this is not a model directory")
    return read_json(path / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


def checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that the checkpoint was saved in, as its config says; float32 where it doesn't."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"config.json: dtype: {dtype!r} is none of float32, bfloat16, float16")
    return str(dtype)


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """The tokens that end a sequence: generation_config.json's, else config.json's, else none.

    Raises ValueError, naming file and field, for what is no token of the model.
    """
    for name in ("generation_config.json", "config.json"):
        file = path / name
        value = read_json(file).get("eos_token_id") if file.is_file() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
            raise ValueError(f"{file}: eos_token_id: {value!r} is neither a token id nor a list of them")
        vocab_size = _vocab_size(path)
        for token in ids:
            if token < 0:
                raise ValueError(f"{file}: eos_token_id: {token} is negative")
            if vocab_size is not None and token >= vocab_size:
                raise ValueError(f"{file}: eos_token_id: {token} is not below vocab_size ({vocab_size})")
        return tuple(ids)
    return ()


def _vocab_size(path: Path) -> int | None:
    """As config.json says, if it does: that the value makes sense is for the family to check."""
    file = path / "config.json"
    value = read_json(file).get("vocab_size") if file.is_file() else None
    return value if isinstance(value, int) else None
