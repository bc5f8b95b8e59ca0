"""Adapters from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import command_line

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "hybridserve" / "models" / "demo" / "adapters"
PROMPT = ["--prompt", "The people of the", "--temperature", "0", "--max-tokens", "8"]


@pytest.fixture
def run(capsys):
    """Runs a command; returns its exit status, standard output and standard error."""
    return lambda *arguments: command_line.run(capsys, arguments)


def test_generate_with_an_adapter(run):
    texts = set()
    for adapter in ([], ["--adapter", "scripture"], ["--adapter", "python"]):
        status, out, _ = run("generate", "demo", *PROMPT, *adapter)
        assert status == 0
        texts.add(out)
    assert len(texts) == 3


def test_generate_several_with_an_adapter(run):
    status, out, _ = run("generate", "demo", *PROMPT, "--adapter", "scripture", "--n", 2)
    assert status == 0
    assert out.startswith("[0] ")
    assert "[1] " in out


def test_compare_shows_each_side_by_side(run):
    status, out, err = run("generate", "demo", *PROMPT, "--compare")
    assert status == 0
    assert "adapters" in err
    labels = [line for line in out.splitlines() if line.startswith("--- ")]
    assert labels == ["--- the base model", "--- python", "--- scripture", "--- shakespeare"]
    assert out.count("The people of the") == 4
    for name in ("python", "scripture"):
        (alone,) = [run("generate", "demo", *PROMPT, "--adapter", name)[1]]
        assert alone.rstrip("\n") in out


def test_a_file_of_prompts_with_adapters(run, tmp_path):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "And"}, {"prompt": "And", "adapter": "python"}, {"prompt": "And", "adapter": None}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, _, err = run(
        "generate", "demo", "--prompts", file, "--out", out, "--adapter", "scripture", "--temperature", 0
    )
    assert status == 0, err
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert [result["adapter"] for result in results] == ["scripture", "python", None]
    assert len({result["text"] for result in results}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--adapter", "milton"], "adapter: 'milton' is unknown; there is python, scripture, shakespeare"),
        (["--adapter", "a\nb"], r"adapter: 'a\nb' is unknown"),
        (["--adapter", "python", "--compare"], "--compare: "),
        (["--n", "2", "--compare"], "--compare: "),
        (["--lora.adapters", "x=/nothing"], "lora.adapters.x: /nothing: no such directory"),
        (["--lora.adapters", "x"], "--lora.adapters: 'x': must map names to directories"),
        (["--lora.adapters", "", "--adapter", "python"], "this engine serves the base model only"),
        (["--kernels.lora", "none"], "--kernels.lora"),
    ],
)
def test_mistakes_are_one_line(run, arguments, message):
    status, out, err = run("generate", "demo", *PROMPT, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_line_that_names_an_unknown_adapter_is_named(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    for value in ('"milton"', "3", "[]"):
        file.write_text('{"prompt": "x"}\n{"prompt": "x", "adapter": ' + value + "}\n")
        status, out, err = run("generate", "demo", "--prompts", file)
        assert (status, out) == (2, "")
        assert f"{file}:2: adapter: " in err
        assert len(err.splitlines()) == 1


def test_adapters_from_an_option(run):
    status, out, err = run(
        "generate", "demo", *PROMPT, "--lora.adapters", f"kjv={ADAPTERS / 'scripture'}", "--adapter", "kjv"
    )
    assert status == 0, err
    assert out == run("generate", "demo", *PROMPT, "--adapter", "scripture")[1]


def test_the_directory_that_was_tried_is_shown_whole(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, err = run("generate", "demo", *PROMPT, "--lora.adapters", "x=some/where")
    assert err == f"hybridserve: lora.adapters.x: {tmp_path}/some/where: no such directory\n"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "c.yaml").write_text("model: demo\nlora: {adapters: {x: some/where}}\n")
    _, _, err = run("generate", "conf/c.yaml", *PROMPT)
    assert err == f"hybridserve: lora.adapters.x: {tmp_path}/conf/some/where: no such directory\n"


def test_the_configuration_of_the_demos_adapters_works_anywhere(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / "demo-lora.yaml"
    status, out, err = run("generate", config, *PROMPT, "--adapter", "kjv")
    assert (status, bool(out)) == (0, True), err


def test_inspect_shows_an_adapters_layout(run):
    status, out, _ = run("inspect", ADAPTERS / "scripture")
    assert status == 0
    assert "LoRA, r 16, alpha 32" in out
    assert "4 x base_model.model.model.layers.*.mamba.in_proj.lora_B.weight [512, 16] F32" in out
    assert "applied" not in out


def test_inspect_reports_what_a_model_would_apply(run, tmp_path):
    status, out, _ = run("inspect", ADAPTERS / "scripture", "--on", "demo")
    assert status == 0
    assert "29 modules" in out
    assert "4 x model.layers.*.mamba.in_proj" in out
    shutil.copytree(ADAPTERS / "scripture", tmp_path / "broken")
    config = tmp_path / "broken" / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 16', '"r": 8'))
    status, _, err = run("inspect", tmp_path / "broken", "--on", "demo")
    assert status == 2
    assert "rank 16" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--on", "demo"], "--on: demo is no adapter's directory"),
        ([ADAPTERS / "scripture", "--on", "/nothing"], "model: '/nothing'"),
        ([ADAPTERS / "scripture", "--block_size", "8"], "--on: is needed"),
        (["--models", "--on", "demo"], "--models: "),
    ],
)
def test_inspect_mistakes(run, arguments, message):
    status, _, err = run("inspect", *arguments)
    assert status == 2
    assert message in err


def test_plan_tells_of_adapters(run):
    _, out, _ = run("plan", "demo", "--json", "--lora.max_loaded", 3)
    lora = json.loads(out)["lora"]
    assert (lora["max_loaded"], lora["max_rank"], sorted(lora["adapters"])) == (
        3,
        64,
        ["python", "scripture", "shakespeare"],
    )
    _, out, _ = run("plan", "demo", "--lora.adapters", "")
    assert "adapters" not in out
