"""Which modules are quantized: groups, names, and what never is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hybridserve.engine.quantization_plan import plan_quantization
from hybridserve.models.config import load_hf_config
from hybridserve.models.registry import build_model
from hybridserve.quant.compressed_tensors import resolve
from hybridserve.quant.policy import Quantization
from tests.harness.models import Backends, random_ids, save_model
from tests.harness.quantized import QuantizedModel, dequantized_copy, everything

if TYPE_CHECKING:
    from pathlib import Path

    from hybridserve.layers.context import BuildContext

MIXER = {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}
EXPERTS = {f"experts.{name}" for name in DENSE}
DELICATE = {"x_proj", "dt_proj", "router", "lm_head"}


@pytest.fixture(scope="module")
def jamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("jamba")
    save_model("jamba", path, 0, num_hidden_layers=4)
    return path


def built(path: Path, *targets: str) -> BuildContext:
    context = Backends().context(quantization=Quantization("int8", targets), device="meta")
    build_model(load_hf_config(path), context)
    return context


def kinds(path: Path, *targets: str) -> tuple[set[str], set[str]]:
    plan = plan_quantization([built(path, *targets)])
    assert plan is not None
    return set(plan.quantized_kinds), set(plan.kept_kinds)


@pytest.mark.parametrize(
    ("targets", "quantized"),
    [
        (("experts",), EXPERTS),
        (("mlp",), EXPERTS | DENSE),
        (("all",), EXPERTS | DENSE | MIXER),
        (("experts", "mamba.x_proj"), EXPERTS | {"x_proj"}),
        (("lm_head", "dt_proj", "router"), {"lm_head", "dt_proj", "router"}),
        (("q_proj", "k_proj", "v_proj"), {"q_proj", "k_proj", "v_proj"}),
        (("model.layers.0.mamba.in_proj",), {"in_proj"}),
        (("model.layers.1.feed_forward.experts",), EXPERTS),
    ],
)
def test_groups_and_names(jamba: Path, targets: tuple[str, ...], quantized: set[str]) -> None:
    found, kept = kinds(jamba, *targets)
    assert found == quantized
    one_of_many = {name.rpartition(".")[2] for name in targets if name.startswith("model.")}
    assert kept | quantized == EXPERTS | DENSE | MIXER | DELICATE
    assert kept & quantized <= one_of_many | EXPERTS


def test_a_whole_name_means_one_module(jamba: Path) -> None:
    formats = built(jamba, "model.layers.0.mamba.in_proj").formats.formats
    assert [name for name, chosen in formats.items() if chosen.name != "none"] == [
        "model.layers.0.mamba.in_proj"
    ]


def test_names_end_at_dots(jamba: Path) -> None:
    with pytest.raises(ValueError, match="'_proj' names no module"):
        plan_quantization([built(jamba, "_proj")])


def test_f076_what_is_never_quantized_unless_named(jamba: Path) -> None:
    """By walking the loaded model: every tensor but codes and scales is as it was."""
    model = QuantizedModel(jamba, everything("int8"), dtype=torch.bfloat16)
    delicate = [name for name in model.formats if name.rpartition(".")[2] in DELICATE]
    assert len(delicate) == 3 * 2 + 2 + 1
    assert {model.formats[name] for name in delicate} == {"none"}

    found: list[torch.Tensor] = []
    seen: set[int] = set()

    def walk(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for each in value.values():
                walk(each)
        elif isinstance(value, list | tuple):
            for each in value:
                walk(each)
        elif type(value).__module__.startswith("hybridserve.") and hasattr(value, "__dict__"):
            walk(vars(value))

    walk(model.model)
    codes = sum(tensor.numel() for tensor in found if tensor.dtype == torch.int8)
    plan = plan_quantization([built(jamba, "all")])
    assert plan is not None
    assert codes == round(plan.share * model.context.weights.num_parameters)
    mixer = model.model.layers[0].mixer  # type: ignore[attr-defined]
    assert (mixer.conv_weight.dtype, mixer.conv_bias.dtype) == (torch.bfloat16, torch.bfloat16)
    assert {tensor.dtype for tensor in (mixer.A, mixer.D, mixer.dt_bias)} == {torch.float32}


@pytest.mark.parametrize(
    "name", ["conv1d", "A_log", "mamba.D", "dt_proj.bias", "embed_tokens", "input_layernorm"]
)
def test_f076_what_can_not_be_quantized_at_all(jamba: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"quantization.targets: '{name}' is never quantized: embeddings"):
        plan_quantization([built(jamba, name)])


def test_a_tied_head_is_an_embedding(tmp_path: Path) -> None:
    save_model("llama", tmp_path, 0, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"'lm_head' is never quantized: embeddings .and a head tied"):
        plan_quantization([built(tmp_path, "lm_head")])


def test_unknown_names_are_listed(jamba: Path) -> None:
    message = r"'expert' names no module of this model; groups are experts, mlp, all, modules .*x_proj"
    with pytest.raises(ValueError, match=message):
        plan_quantization([built(jamba, "all", "expert")])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_proj", "v_proj"), r"q_proj, \S+v_proj, which is computed together with \S+k_proj:"),
        (("up_proj",), r"up_proj, which is computed together with \S+gate_proj"),
        (
            ("experts.2.up_proj",),
            r"experts.2.up_proj, which is .*experts.0.gate_proj, .* and 5 more: all",
        ),
    ],
)
def test_a_part_of_what_is_merged_is_refused(jamba: Path, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(jamba, *targets)


def test_named_delicate_modules_work(jamba: Path, tmp_path: Path) -> None:
    """And the model is that of its dequantized weights."""
    ids = random_ids(0, 12)
    model = QuantizedModel(jamba, Quantization("int8", ("all", "x_proj", "dt_proj", "router", "lm_head")))
    assert set(model.formats.values()) == {"int8"}
    logits = model.runner.run(ids)
    rounded = QuantizedModel(dequantized_copy(model, jamba, tmp_path / "rounded"), Quantization())
    assert (logits - rounded.runner.run(ids)).abs().max() <= 1e-4
    without = QuantizedModel(jamba, everything("int8")).runner.run(ids)
    assert (logits - without).abs().mean() > 1e-3, "that they are quantized would not be seen"


def test_patterns_name_modules_too(jamba: Path) -> None:
    assert kinds(jamba, r"re:.*\.mamba\.(in|out)_proj$")[0] == {"in_proj", "out_proj"}
    with pytest.raises(ValueError, match=r"'re:.*nothing' names no module of this model"):
        plan_quantization([built(jamba, "re:.*nothing")])
    with pytest.raises(ValueError, match=r"'re:.*norm.*' is never quantized"):
        plan_quantization([built(jamba, "re:.*norm.*")])


@pytest.mark.parametrize("family", ["bamba", "mamba", "llama", "qwen2"])
def test_other_families(tmp_path: Path, family: str) -> None:
    save_model(family, tmp_path, 0, tie_word_embeddings=False)
    quantized, kept = kinds(tmp_path, "all")
    mamba = {"in_proj", "out_proj"}
    assert quantized == {"bamba": DENSE | MIXER, "mamba": mamba}.get(family, DENSE | MIXER - mamba)
    assert kept == {"lm_head"} | ({"x_proj", "dt_proj"} if family == "mamba" else set())


def test_what_is_asked_for_and_what_the_checkpoint_is() -> None:
    stored = Quantization("fp8", ("Linear",), ("lm_head",), stored=True)
    assert resolve("auto", None, None) == resolve("none", None, None) == Quantization()
    assert resolve("int8", None, None) == Quantization("int8", ("all",))
    assert resolve("auto", None, stored) == resolve("fp8", None, stored) == stored
    for wanted in ("int8", "none"):
        with pytest.raises(ValueError, match=rf"format: {wanted}, but .* quantized already, as fp8"):
            resolve(wanted, None, stored)
    with pytest.raises(ValueError, match=r"quantization\.targets: the checkpoint is quantized already"):
        resolve("auto", ("all",), stored)
    with pytest.raises(ValueError, match=r"quantization.targets: has no effect without quantization\.format"):
        resolve("auto", ("all",), None)
