"""What a user may get wrong on the command line: one line on standard error, exit status 2, no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybridserve
from hybridserve.cli import main
from hybridserve.config.loader import load_config

DEMO = Path(hybridserve.__file__).parent / "models" / "demo"


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail; returns the line that it says."""

    def run(*arguments: object, has_started: bool = False) -> str:
        with pytest.raises(SystemExit) as status:
            main([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        assert status.value.code == 2
        assert shown.out == ""
        *plan, line = shown.err.splitlines()
        assert bool(plan) == has_started
        assert line.startswith("hybridserve")
        return line

    return run


@pytest.fixture
def model(tmp_path) -> Path:
    """A copy of the demo model to be damaged."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def change_config(model: Path, **values: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "hybridserve: the following arguments are required: COMMAND"),
        (["serv"], "invalid choice: 'serv'"),
        (["generate"], "the following arguments are required: MODEL_OR_YAML"),
        (["generate", "demo"], "one of the arguments --prompt --prompts is required"),
        (["generate", "demo", "--prompt", "x", "--temperatur", "1"], "did you mean --temperature?"),
        (["generate", "demo", "--promt", "x"], "unknown argument '--promt'; did you mean --prompt?"),
        (["serve", "demo", "--prot", "3"], "unknown argument '--prot'; did you mean --port?"),
        (["serve", "demo", "--server.prot=3"], "did you mean --server.port?"),
        (["--versio"], "unknown argument '--versio'; did you mean --version?"),
        (["generate", "demo", "--prompt", "x", "--blok-size", "1"], "did you mean --block_size?"),
        (["generate", "demo", "--prompt", "x", "--cache.blok_size=1"], "did you mean --cache.block_size?"),
        (["generate", "demo", "--prompt", "x", "--hue", "a"], "'--hue'; see hybridserve generate --help"),
        (["generate", "--model", "demo", "--prompt", "x"], "'--model'; see hybridserve generate --help"),
        (["plan", "demo", "--model=demo"], "unknown argument '--model=demo'; see hybridserve plan --help"),
        (["generate", "demo", "--prompt", "x", "--prompt-file", "y"], "'--prompt_file'; see hybridserve gen"),
        (["generate", "demo", "--prompt", "x", "--colour.dtype", "1"], "see hybridserve generate --help"),
        (["generate", "demo", "--prompt", "x", "prompts"], "'prompts'; see hybridserve generate --help"),
        (["generate", "demo", "--prompt", "x", "--h"], "'--h'; see hybridserve generate --help"),
        (["generate", "demo", "--prompt", "x", "--n", "x"], "argument --n: invalid int value: 'x'"),
        (["generate", "demo", "--prompt", "x", "--n", "0"], "n: 0 is out of range"),
        (["generate", "demo", "--prompt", "x", "--temperature", "-1"], "temperature: -1.0 is out of range"),
        (["generate", "demo", "--prompt", "x", "--temperature", "nan"], "temperature: nan is not a number"),
        (["generate", "demo", "--prompt", "x", "--max-tokens", "0"], "max_tokens: 0 asks for nothing"),
        (["generate", "demo", "--prompt", "x", "--stop", ""], "stop: an empty string"),
        (["generate", "demo", "--prompt", "x", "--logprobs", "1"], "--logprobs: is only reported for"),
        (["generate", "demo", "--prompt", "x", "--out", "y"], "--out: is for the results of --prompts"),
        (["generate", "demo", "--prompt", "x", "--block_size", "3"], "block_size: 3: must be a power of two"),
        (["generate", "none.yaml", "--prompt", "x"], "none.yaml: cannot be read: No such file or directory"),
        (["plan", "none.YML"], "none.YML: cannot be read: No such file or directory"),
        (["plan", "None.YAML"], "None.YAML: cannot be read: No such file or directory"),
        (["generate", "./none", "--prompt", "x"], "model: './none': no such directory"),
        (["plan", "demo", "--dtype", "int8"], "dtype: 'int8': should be 'auto', 'float32'"),
        (["plan", "demo", "--dtype", "int8"], "hybridserve: --dtype: 'int8': "),
        (["plan", "demo", "--cache.dtype", "int8"], "hybridserve: --cache.dtype: 'int8': "),
        (["generate", "", "--prompt", "x"], "hybridserve: model: '': should have at least 1 character"),
        (["inspect", "--block_size", "8"], "MODEL_OR_YAML: is needed"),
        (["inspect", "nodir", "--models"], "--models: lists what any model may be"),
        (["inspect", "--models", "--block_size", "8"], "--models: lists what any model may be"),
        (["inspect", ""], "hybridserve: model: '': "),
        (["plan", "~no-such-user/x"], "model: '~no-such-user/x': no such directory"),
    ],
)  # fmt: skip
def test_arguments(fails, arguments, message):
    assert message in fails(*arguments)


def test_prompt_that_is_empty(fails):
    assert "prompt: " in fails("generate", "demo", "--prompt", "")


def test_prompt_longer_than_the_model_goes(fails):
    said = fails("generate", "demo", "--prompt", "word " * 100, "--max_model_len", 64)
    assert "prompt" in said
    assert "64" in said


def test_arena_too_small_for_one_sequence(fails):
    said = fails("generate", "demo", "--prompt", "x", "--memory_bytes", "1MiB")
    assert "max_model_len" in said
    assert "MiB" in said


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("memory", ["1", "200KiB", "500KiB", "1000000", "1MiB", "2MiB"])
def test_advice_on_a_small_arena_is_right(fails, capsys, block_size, memory):
    command = ["plan", "demo", "--block_size", block_size]
    said = fails(*command, "--memory_bytes", memory)
    needed = said.rpartition("give the cache ")[2]
    length = re.search(r"set max_model_len to (\S+) or less", said)
    tried = [["--memory_bytes", needed]]
    assert (length is None) == ("is too small an arena" in said)
    if length is not None:
        tried.append(["--memory_bytes", memory, "--max_model_len", length[1]])
    for options in tried:
        with pytest.raises(SystemExit) as status:
            main([str(argument) for argument in [*command, *options]])
        assert status.value.code == 0, capsys.readouterr().err
    capsys.readouterr()
    number, unit = needed.split()
    fails(*command, "--memory_bytes", f"{float(number) - 0.2:.1f} {unit}")


def test_arena_larger_than_the_machine(fails):
    said = fails("plan", "demo", "--memory_bytes", "100TiB")
    assert re.search(r"cache.memory_bytes: 100.0 TiB, beside .* MiB of weights, is more than the ", said)
    fitting = re.search(r"what would fit: cache.memory_bytes: (\S+)$", said)
    assert fitting, said
    load_config("demo", overrides={"memory_bytes": fitting[1]})


def test_unsupported_architecture_lists_the_supported(fails, model):
    change_config(model, architectures=["GPT2LMHeadModel"])
    said = fails("generate", model, "--prompt", "x")
    assert "GPT2LMHeadModel" in said
    assert "JambaForCausalLM" in said


def test_folder_without_config(fails, model):
    (model / "config.json").unlink()
    assert "no config.json" in fails("plan", model)


def test_truncated_weights(fails, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in fails("generate", model, "--prompt", "x")


def test_no_tokenizer_and_a_text(fails, model):
    (model / "tokenizer.json").unlink()
    said = fails("generate", model, "--prompt", "x")
    assert "tokenizer.json" in said
    assert "token ids" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", 'a line is an object with "prompt"'),
        ('{"text": "x"}', 'a line is an object with "prompt"'),
        (
            '{"prompt": "x", "max_token": 1}',
            "max_token: unknown; allowed are prompt, adapter, allowed_token_ids",
        ),
        ('{"prompt": "x", "adapter": "a"}', "adapter: 'a' is unknown"),
        ('{"prompt": "x", "temperature": NaN}', "temperature: nan"),
        ('{"prompt": "x", "stop": [""]}', "stop: an empty string"),
        ('{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias: 'a': must map token ids to numbers"),
    ],
)
def test_line_of_a_file_is_named(fails, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    said = fails("generate", "demo", "--prompts", path)
    assert f"{path}:3: " in said
    assert message in said


@pytest.mark.parametrize("ids", [[-1], [4096], [], [True], [1.5], ["x"]])
def test_ids_that_are_no_prompt(fails, tmp_path, ids):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": [1, 2]}) + "\n" + json.dumps({"prompt": ids}) + "\n")
    out = tmp_path / "out.jsonl"
    said = fails("generate", "demo", "--prompts", path, "--out", out)
    assert f"{path}:2: prompt: " in said
    assert sorted(tmp_path.iterdir()) == [path]


def test_file_of_prompts_that_is_not_there(fails, tmp_path):
    assert f"{tmp_path / 'x'}: No such file" in fails("generate", "demo", "--prompts", tmp_path / "x")


def test_directory_of_results_that_is_not_there(fails, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    assert "is not a directory" in fails("generate", "demo", "--prompts", path, "--out", tmp_path / "a" / "b")
    assert "is a directory" in fails("generate", "demo", "--prompts", path, "--out", tmp_path)


def test_results_that_cannot_be_written_leave_nothing_behind(fails, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 1}\n')

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    out = tmp_path / "out.jsonl"
    assert f"{out}: No space left" in fails(
        "generate", "demo", "--prompts", path, "--out", out, has_started=True
    )
    assert list(tmp_path.iterdir()) == [path]


def test_links_in_a_circle(fails, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    said = fails("generate", "demo", "--prompts", path, "--out", tmp_path / "a")
    assert f"{tmp_path / 'a'}: Too many levels of symbolic links" in said


@pytest.mark.parametrize("arguments", [["plan", "demo"], ["generate", "demo", "--prompt", "x"]])
def test_closed_standard_output(arguments):
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "hybridserve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(hybridserve.__file__).parents[1])},
    )
    assert (done.returncode, done.stderr) == (2, "hybridserve: standard output is closed\n")
