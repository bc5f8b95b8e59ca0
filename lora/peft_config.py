"""adapter_config.json: what of it changes the result, and what can't be served.

The tensors of the file are the truth about what is adapted; the config tells their scale, and whether there
is more to the computation than they say. Knows the fields of peft 0.21's LoraConfig and nothing of tensors.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from hybridserve.lora.tensor_file import parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 256 << 10
MAX_INVOCATION_TOKENS = 4096
MAX_ALPHA = 1e9
MAX_RANK = 1 << 20
MAX_PATTERNS = 8192
MAX_PATTERN_LENGTH = 512
MAX_PATTERN_COST = 1 << 22
"""Steps for a name, by order of magnitude, of all patterns together: some hundredths of a second."""

REFUSED = {
    "modules_to_save": "whole modules that replace those of the base model are not supported",
    "trainable_token_indices": "replaced rows of the embedding are not supported",
    "layer_replication": "a model with repeated layers is another model",
    "use_qalora": "QALoRA pools the inputs of its modules, which is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "kasa_config": "KaSA changes the base model's weights",
    "arrow_config": "Arrow routes among several adapters, which is not supported",
    "monteclora_config": "MonteCLoRA samples its weights, which is not supported",
}
"""Fields that change the computation in a way that is not implemented, if they are set."""

IRRELEVANT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "revision", "task_type"),
    *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),  # the keys tell
    *("bias", "ensure_weight_tying"),  # these too: bias tensors in the file are refused
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "lora_dropout", "velora_config"),
    *("fan_in_fan_out", "megatron_config", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""Fields that say where an adapter comes from, how it was trained, or what its tensors' keys say as well."""

HARMLESS_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Ways to begin a training that leave the base model as it is."""

HARMFUL_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Those that take something out of its weights, with whatever follows the name."""


def _none_is_empty(value: Any) -> Any:
    return {} if value is None else value


T = TypeVar("T")
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Field(allow_inf_nan=False, ge=-MAX_ALPHA, le=MAX_ALPHA)]
Patterns = BeforeValidator(_none_is_empty)


class PeftConfig(BaseModel):
    """The fields that matter, by peft's names."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peft_type: Literal["LORA"]
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: Annotated[dict[str, Rank], Patterns] = Field(default={}, max_length=MAX_PATTERNS)
    alpha_pattern: Annotated[dict[str, Alpha], Patterns] = Field(default={}, max_length=MAX_PATTERNS)
    use_dora: bool = False
    lora_bias: bool = False
    target_parameters: list[str] | None = None
    peft_version: str | None = None
    init_lora_weights: bool | str = True
    alora_invocation_tokens: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None, max_length=MAX_INVOCATION_TOKENS
    )

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _check_init(cls, value: Any) -> bool | str:
        if isinstance(value, bool):
            return value
        name = value.lower() if isinstance(value, str) else ""
        if name not in HARMLESS_INITS:
            if not name.startswith(HARMFUL_INITS):
                raise ValueError("unknown initialisation")
            raise ValueError(
                "the training began by changing the base model's weights, so the adapter is wrong for the "
                "base model as it is: save it with peft's path_initial_model_for_weight_conversion"
            )
        return name

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _check_patterns(cls, patterns: dict[str, Any]) -> dict[str, Any]:
        """A regular expression comes from whoever made the adapter, and some take for ever to say no."""
        if sum(map(_cost, patterns)) > MAX_PATTERN_COST:
            raise ValueError(
                "the patterns repeat too much, or have too many alternatives, to be matched safely"
            )
        return patterns

    @property
    def version(self) -> tuple[int, ...] | None:
        """Of the peft that saved it, as far as it says: 0.17 didn't."""
        match = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", self.peft_version or "")
        return tuple(map(int, match.groups())) if match else None

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Raises ValueError, naming file and field, for what can't be served; OSError as `open` does."""
        path = directory / CONFIG_FILE
        if not path.is_file():
            raise ValueError(f"{directory}: no {CONFIG_FILE} there, so this is no adapter as peft saves it")
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise ValueError(f"{path}: larger than the limit of {MAX_CONFIG_BYTES} bytes")
        fields = parse_json(path, text)
        if "peft_type" not in fields:
            raise ValueError(f"{path}: peft_type is missing")
        try:
            config = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "missing":
                raise ValueError(f"{path}: {name} is missing") from None
            message = re.sub("^[A-Z][a-z]+ should", "should", first["msg"].removeprefix("Value error, "))
            raise ValueError(f"{path}: {name}: {shown(first['input'])}: {message}") from None
        _refuse(path, fields, cls.model_fields.keys())
        for other in ("lora_bias", "alora_invocation_tokens"):
            if config.use_dora and getattr(config, other):
                raise ValueError(f"{path}: use_dora together with {other} has no meaning that peft defines")
        return config


class Scaling:
    """The rank and scale that a config gives to each name, as peft looks them up."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        self._ranks = _wrap_all(config.rank_pattern)
        self._alphas = _wrap_all(config.alpha_pattern)

    def rank(self, name: str) -> int:
        return _lookup(self._ranks, name, self._config.r)

    def scale(self, name: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
        rank, alpha = self.rank(name), _lookup(self._alphas, name, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)


def _refuse(path: Path, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """For fields that are set and must not be ignored."""
    for name, value in fields.items():
        if not value or name in known or name in IRRELEVANT:
            continue
        reason = REFUSED.get(name, "not a field of LoRA that is known here, so what it changes isn't either")
        raise ValueError(f"{path}: {shown(name)}: {shown(value)}: {reason}")


def _cost(pattern: str) -> int:
    """How many steps it takes at most, by order of magnitude, to match a name of 64 characters.

    Raises ValueError for what is no regular expression, and for one of which that can't be told.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(f"a pattern of {len(pattern)} characters, and the limit is {MAX_PATTERN_LENGTH}")
    try:
        re.compile(pattern)
        _wrap(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {shown(pattern)} is no regular expression: {error}") from None
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", pattern)
    if re.search(r"\)[*+{]", plain):
        raise ValueError(f"the pattern {shown(pattern)} repeats a group, which can take for ever")
    cost: int = 64 ** len(re.findall(r"[*+{]", plain)) * 2 ** plain.count("?")
    open_groups = [1]
    for character in plain:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")":
            cost *= open_groups.pop()
    return cost * open_groups.pop()


def _wrap(pattern: str) -> re.Pattern[str]:
    """As peft matches it: the end of a name, from the start or after a dot."""
    return re.compile(rf"(.*\.)?({pattern})$")


def _wrap_all(patterns: Mapping[str, T]) -> list[tuple[re.Pattern[str], T]]:
    return [(_wrap(pattern), value) for pattern, value in patterns.items()]


def _lookup(patterns: list[tuple[re.Pattern[str], T]], name: str, default: T) -> T:
    """The value of the first pattern that matches."""
    return next((value for pattern, value in patterns if pattern.match(name)), default)
