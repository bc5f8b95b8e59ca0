"""Checkpoints that others have quantized: what is read, and what is refused by name."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.config.loader import load_config
from hybridserve.engine.planner import make_plan
from hybridserve.quant.compressed_tensors import join, packed_shape, read_config, unpack, write_config
from hybridserve.quant.format import WeightError
from hybridserve.quant.fp8 import Fp8Format
from hybridserve.quant.policy import Quantization
from tests.harness.models import oracle, random_ids, save_model
from tests.harness.quantized import (
    QuantizedModel,
    dequantized_copy,
    edit_config,
    edit_tensors,
    everything,
)
from tests.harness.w8a8 import Watched, absmax_127, w8a8_oracle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDS = random_ids(0, 20)
IN_PROJ = "model.layers.0.mamba.in_proj"
GATE = "model.layers.1.feed_forward.experts.2.gate_proj"
KEPT = ("x_proj", "dt_proj", "router", "lm_head", "embed_tokens", "conv1d", "norm")


def config(
    *,
    weights: dict[str, Any] | None = None,
    inputs: dict[str, Any] | None = None,
    group: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """As llm-compressor writes one, down to the fields that say nothing."""
    arguments = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        **(weights or {}),
    }
    first = {
        "targets": ["Linear"],
        "weights": arguments,
        "input_activations": inputs,
        "output_activations": None,
        **(group or {}),
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "global_compression_ratio": 1.2,
            "kv_cache_scheme": None,
            "sparsity_config": {},
            "transform_config": {},
            "version": "0.10.2",
            "ignore": ["lm_head", "re:.*router", "re:.*x_proj", "re:.*dt_proj"],
            "config_groups": {"group_0": first},
            **fields,
        }
    }


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT = {"type": "float"}
FLOAT_TOKEN = {**TOKEN, "type": "float"}
STATIC = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (config(), "int8"),
        (config(format="pack-quantized"), "int8"),
        (config(weights={"strategy": "tensor"}), "int8"),
        (config(inputs=TOKEN), "int8-w8a8"),
        (config(weights=FLOAT, format="float-quantized"), "fp8"),
        (config(weights=FLOAT, inputs=FLOAT_TOKEN, format="float-quantized"), "fp8"),
        (config(weights={**FLOAT, "strategy": "tensor"}, inputs=STATIC, format="naive-quantized"), "fp8"),
        (config(group={"format": "pack-quantized"}, format="mixed-precision"), "int8"),
        (config(weights=FLOAT, group={"format": "float-quantized"}, format="mixed-precision"), "fp8"),
        (config(format=None), "int8"),
    ],
)
def test_schemes_that_are_read(found: dict[str, Any], name: str) -> None:
    quantization = read_config(found)
    assert quantization is not None
    assert (quantization.format, quantization.stored) == (name, True)
    assert quantization.selects("model.layers.3.self_attn.q_proj", "mixer")
    assert not quantization.selects("model.layers.1.feed_forward.router", "delicate")
    assert not quantization.selects("lm_head", "delicate")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes' is not"),
        ({"quantization_config": "gptq"}, "'gptq' is not an object"),
        (config(format="marlin-24"), "format: 'marlin-24': not supported"),
        (config(weights={"num_bits": 4}), r"weights.num_bits: 4: not supported"),
        (config(weights={"strategy": "group"}), r"weights.strategy: 'group': not supported"),
        (config(weights={"group_size": 128}), r"weights.group_size: 128: not supported"),
        (config(weights={"symmetric": False}), r"weights.symmetric: False: not supported"),
        (config(weights={"actorder": "static"}), r"weights.actorder: 'static': not supported"),
        (config(weights={"surprise": 1}), r"weights.surprise: 1: not supported"),
        (config(weights={"dynamic": True}), "dynamic True: not supported"),
        (config(inputs={**TOKEN, "dynamic": False}), "static int8 activations, a scale a token: not supp"),
        (config(inputs={**TOKEN, "strategy": "tensor"}), "dynamic int8 activations, a scale a tensor: not"),
        (config(inputs=FLOAT_TOKEN), "int8 weights, a scale a channel, dynamic float8 activations"),
        (config(group={"output_activations": TOKEN}), r"output_activations: .*: not supported"),
        (config(kv_cache_scheme=TOKEN), r"kv_cache_scheme: .*: not supported"),
        (config(sparsity_config={"format": "sparse-24"}), r"sparsity_config: .*: not supported"),
        (config(transform_config={"R1": {}}), r"transform_config: .*: not supported"),
        (config(config_groups={}), "config_groups: {}: not supported"),
        (config(surprise=True), "surprise: True: not supported"),
        (
            config(format="float-quantized"),
            "config_groups.group_0: int weights, but the format is float-quant",
        ),
        (config(weights=FLOAT), "config_groups.group_0: float weights, but the format is int-quantized"),
        (config(group={"format": "float-quantized"}), "int weights, but the format is float-quantized"),
        (config(ignore=["re:(?!lm)head"]), r"'re:\(\?!lm\)head': \(\? but for \(\?:, at character 2, is not"),
        (config(group={"targets": ["re:*"]}), r"'re:\*': a \* there, at character 1, is not understood"),
    ],
)
def test_others_are_refused_by_name(found: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^config.json: quantization_config.*{message}"):
        read_config(found)


def test_two_schemes_in_one_checkpoint_are_refused() -> None:
    groups = {
        f"group_{index}": config(inputs=inputs)["quantization_config"]["config_groups"]["group_0"]
        for index, inputs in enumerate((None, TOKEN))
    }
    with pytest.raises(ValueError, match="config_groups: int8 and int8-w8a8 in one checkpoint"):
        read_config(config(config_groups=groups))


@pytest.mark.parametrize("name", ["int8", "int8-w8a8", "fp8"])
def test_what_is_written_is_read(name: str) -> None:
    written = {"quantization_config": write_config(name, ["lm_head"])}
    assert read_config(written) == Quantization(name, ("Linear",), ("lm_head",), stored=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    save_model("jamba", path, 0, num_hidden_layers=4)
    return path


def quantized_elsewhere(
    source: Path,
    path: Path,
    found: dict[str, Any],
    store: Callable[[str, torch.Tensor], dict[str, torch.Tensor]],
) -> Path:
    """A checkpoint whose projections `store` has replaced, given name and weight, by tensors of its own."""
    shutil.copytree(source, path)
    edit_config(path, **found)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith(".weight") and not any(kept in name for kept in KEPT):
                module = name.removesuffix(".weight")
                tensors |= {
                    f"{module}.{part}": tensor for part, tensor in store(module, tensors.pop(name)).items()
                }

    edit_tensors(path, change)
    return path


def channel(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As compressed-tensors does it: -128 is a code, and scales have the model's dtype."""
    scale = (weight.abs().amax(1, keepdim=True) * 2 / 255).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale}


def packed(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = channel(module, weight)
    shifted = stored["weight"].to(torch.int32) + 128
    words = sum(shifted[:, place::4] << 8 * place for place in range(4))
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": stored["weight_scale"],
        "weight_shape": torch.tensor(weight.shape),
    }


def whole(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """One scale in all, with an input scale beside it; written in two shapes that occur."""
    scale = weight.abs().amax() / 448
    shape = () if "experts" in module else (1,)
    return {
        "weight": (weight / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale.reshape(shape),
        "input_scale": torch.tensor([0.1]),
    }


def fp8_channel(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes, scales, _ = Fp8Format.quantize_rows(weight)
    return {"weight": codes, "weight_scale": scales[:, None]}


@pytest.mark.parametrize(
    ("found", "store"),
    [
        (config(), channel),
        (config(format="pack-quantized"), packed),
        (config(weights={**FLOAT, "strategy": "tensor"}, inputs=STATIC, format="naive-quantized"), whole),
        (config(weights=FLOAT, inputs=FLOAT_TOKEN, format="float-quantized"), fp8_channel),
    ],
    ids=["int8", "int8-packed", "fp8-tensor", "fp8-channel"],
)
def test_a_model_quantized_elsewhere(
    source: Path, tmp_path: Path, found: dict[str, Any], store: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """Is the model whose weights are codes times scales, as this test multiplies them."""
    path = quantized_elsewhere(source, tmp_path / "quantized", found, store)
    model = QuantizedModel(path)
    plain = QuantizedModel(dequantized_copy(model, source, tmp_path / "plain"))
    assert (model.runner.run(IDS) - plain.runner.run(IDS)).abs().max() <= 1e-4
    checked = 0
    for module, base in QuantizedModel(source).bases.items():
        if model.formats.get(module, "none") != "none":
            stored = store(module, base())
            codes = stored["weight"] if "weight" in stored else channel(module, base())["weight"]
            expected = codes.float() * stored["weight_scale"].float()
            torch.testing.assert_close(model.bases[module](), expected, rtol=1e-6, atol=0)
            checked += 1
    assert checked == 3 * 2 + 4 + 2 * 12 + 2 * 3


def test_w8a8_quantized_elsewhere(source: Path, tmp_path: Path) -> None:
    """Is the model of its dequantized weights, whose rows are rounded; token by token, for few of which a
    rounding is in doubt."""
    path = quantized_elsewhere(source, tmp_path / "w8a8", config(inputs=TOKEN), channel)
    model = QuantizedModel(path)
    quantized = [name for name, format_name in model.formats.items() if format_name != "none"]
    rounding = Watched(absmax_127)
    other = w8a8_oracle(dequantized_copy(model, source, tmp_path / "plain"), quantized, rounding)
    checked = 0
    for ids in ([token] for token in IDS[:8]):
        rounding.forget()
        expected, _ = oracle(other, ids)
        model.runner.sequences[0].num_computed = 0
        if not rounding.was_near_an_edge:
            assert (model.runner.run(ids) - expected).abs().max() <= 1e-4
            checked += 1
    assert checked > 2


def test_packing() -> None:
    """The first code in the lowest byte, 128 more than it is."""
    word = (0 + 128) | (1 + 128) << 8 | (-128 + 128) << 16 | (127 + 128) << 24
    stored = torch.tensor([[word - (1 << 32)]], dtype=torch.int32)
    assert unpack(stored).tolist() == [[0, 1, -128, 127]]
    assert packed_shape((3, 8)) == (3, 2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,), (4, 1)])
def test_shapes_of_scales(shape: tuple[int, ...]) -> None:
    assert join(torch.zeros(4, 3, dtype=torch.int8), torch.full(shape, 2.0), "s").scales.tolist() == [2.0] * 4


@pytest.mark.parametrize("shape", [(4, 2), (1, 3), (2,)])
def test_scales_of_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WeightError, match="only one a row, or one in all"):
        join(torch.zeros(4, 3, dtype=torch.int8), torch.ones(shape), "s")


class TestSpoiled:
    @pytest.fixture
    def path(self, source: Path, tmp_path: Path) -> Path:
        return quantized_elsewhere(source, tmp_path / "quantized", config(), channel)

    def refused(self, path: Path, message: str) -> None:
        with pytest.raises(ValueError, match=rf"model.safetensors: the tensor {message}"):
            QuantizedModel(path)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.01])
    @pytest.mark.parametrize("module", [IN_PROJ, GATE])
    def test_scales_that_are_no_scales(self, path: Path, value: float, module: str) -> None:
        edit_tensors(path, lambda tensors: tensors[f"{module}.weight_scale"][3].fill_(value))
        self.refused(
            path, f"'{module}.weight' has scales in '{module}.weight_scale' that are NaN, infinite, zero or"
        )

    def test_missing_scales(self, path: Path) -> None:
        edit_tensors(path, lambda tensors: tensors.pop(f"{GATE}.weight_scale"))
        self.refused(path, f"'{GATE}.weight' is quantized, but its scales '{GATE}.weight_scale' are missing")

    @pytest.mark.parametrize(
        ("dtype", "spelled"),
        [(torch.bool, "BOOL"), (torch.int64, "I64"), (torch.uint8, "U8"), (torch.float8_e4m3fn, "F8_E4M3")],
    )
    def test_scales_of_other_types(self, path: Path, dtype: torch.dtype, spelled: str) -> None:
        name = f"{GATE}.weight_scale"
        edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(128, 1).to(dtype)}))
        self.refused(path, f"'{GATE}.weight' has scales in '{name}' that are {spelled}: not supported")

    @pytest.mark.parametrize(("dtype", "spelled"), [(torch.uint8, "U8"), (torch.int32, "I32")])
    def test_codes_of_other_types(self, path: Path, dtype: torch.dtype, spelled: str) -> None:
        name = f"{GATE}.weight"
        edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
        self.refused(path, f"'{name}' is {spelled}: not supported")

    def test_packed_codes_of_another_shape(self, source: Path, tmp_path: Path) -> None:
        path = quantized_elsewhere(source, tmp_path / "packed", config(format="pack-quantized"), packed)
        name = f"{GATE}.weight_shape"
        edit_tensors(path, lambda tensors: tensors.update({name: torch.tensor([128, 61])}))
        self.refused(
            path,
            rf"'{GATE}.weight_packed' is \[128, 61\] as '{name}' says, but the model's config makes it "
            r"\[128, 64\]",
        )

    def test_targets_that_select_nothing(self, path: Path) -> None:
        for fields in (config(group={"targets": ["Conv1d", "re:.*nothing"]}), config(ignore=["re:.*"])):
            edit_config(path, **fields)
            with pytest.raises(ValueError, match=r"^config.json: quantization_config: no module of this mod"):
                make_plan(load_config(str(path), None, {"memory_bytes": "64MiB"}), path)

    def test_missing_codes(self, path: Path) -> None:
        edit_tensors(path, lambda tensors: tensors.pop(f"{GATE}.weight"))
        self.refused(path, f"'{GATE}.weight_scale' belongs nowhere")

    def test_zero_points(self, path: Path) -> None:
        edit_tensors(path, lambda tensors: tensors.update({f"{GATE}.weight_zero_point": torch.zeros(128, 1)}))
        self.refused(path, f"'{GATE}.weight_zero_point' belongs nowhere")

    def test_a_plain_tensor_where_codes_should_be(self, path: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            del tensors[f"{GATE}.weight_scale"]
            tensors[f"{GATE}.weight"] = tensors[f"{GATE}.weight"].float()

        edit_tensors(path, change)
        self.refused(
            path, f"'{GATE}.weight' is not quantized, but the checkpoint's quantization_config says int8"
        )

    def test_codes_of_another_format(self, path: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[f"{GATE}.weight"] = tensors[f"{GATE}.weight"].to(torch.float8_e4m3fn)

        edit_tensors(path, change)
        self.refused(
            path, f"'{GATE}.weight' holds torch.float8_e4m3fn codes, but the checkpoint's format is int8"
        )

    def test_codes_where_the_config_says_none(self, path: Path) -> None:
        edit_config(path, **config(ignore=["lm_head", "re:.*(x|dt|out)_proj", "re:.*router"]))
        self.refused(
            path, r"'\S+out_proj.weight' is quantized, but the checkpoint's quantization_config does not"
        )

    def test_codes_without_a_config(self, path: Path, source: Path) -> None:
        shutil.copy(source / "config.json", path / "config.json")
        self.refused(path, r"'\S+' is quantized, but the checkpoint's quantization_config does not say so")

    def test_codes_under_a_format_made_while_loading(self, path: Path, source: Path) -> None:
        shutil.copy(source / "config.json", path / "config.json")
        with pytest.raises(ValueError, match=r"is quantized, but the checkpoint has no quantization_config"):
            QuantizedModel(path, everything("int8"))

    def test_a_norm_in_codes(self, path: Path) -> None:
        name = "model.final_layernorm.weight"
        edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(64, dtype=torch.int8)}))
        self.refused(path, f"'{name}' is quantized, but it is none of those that can be")

    def test_a_part_of_what_is_merged(self, path: Path) -> None:
        edit_config(path, **config(ignore=["lm_head", "re:.*(x|dt)_proj", "re:.*router", "re:.*k_proj"]))
        with pytest.raises(
            ValueError, match=r"quantization_config: quantizes .*q_proj.* with .*k_proj: all of"
        ):
            QuantizedModel(path)

    def test_wrong_shape(self, path: Path) -> None:
        edit_tensors(
            path, lambda tensors: tensors.update({f"{GATE}.weight": torch.zeros(128, 63, dtype=torch.int8)})
        )
        self.refused(path, rf"'{GATE}.weight' is \[128, 63\], but the model's config makes it \[128, 64\]")


def test_online_quantization_of_what_is_quantized_is_refused(source: Path, tmp_path: Path) -> None:
    path = quantized_elsewhere(source, tmp_path / "quantized", config(), channel)
    with pytest.raises(ValueError, match="quantized, but built as if it were not"):
        QuantizedModel(path, Quantization("int8", ("all",)))
