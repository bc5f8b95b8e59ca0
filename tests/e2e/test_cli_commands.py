"""The commands as a user runs them, and how quickly a command line answers."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import hybridserve
from hybridserve.cli import main
from tests.harness import command_line
from tests.harness.command_line import imported_by

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-m", "hybridserve"]


@pytest.fixture
def run(capsys):
    """Runs a command that must succeed; returns what it says on standard output and standard error."""

    def run_command(*arguments: object) -> tuple[str, str]:
        status, out, err = command_line.run(capsys, arguments)
        assert status == 0, err
        return out, err

    return run_command


def test_import_brings_neither_torch_nor_pydantic():
    assert not {"torch", "numpy", "transformers", "pydantic"} & imported_by("import hybridserve")


def test_what_no_guard_covers_imports_nothing():
    """An interrupt during these is a traceback, so they must take no time."""
    brought = imported_by("import hybridserve.__main__") - imported_by("pass")
    assert brought <= {"__future__", "hybridserve", "hybridserve.__main__", "hybridserve.version"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_brings_neither_torch_nor_pydantic(arguments):
    modules = imported_by(f"from hybridserve.cli import main; main({arguments})")
    assert not {"torch", "numpy", "transformers", "pydantic"} & modules


@pytest.mark.parametrize("command", ["generate", "inspect", "plan"])
def test_help_of_a_command_needs_no_torch(command):
    modules = imported_by(f"from hybridserve.cli import main; main(['{command}', '--help'])")
    assert not {"torch", "numpy", "transformers"} & modules


def test_help_tells_every_key(run):
    from hybridserve.config.loader import config_keys

    shown, _ = run("plan", "--help")
    assert all(f"--{key} " in shown for key in config_keys() if key != "model")


def test_generate_streams_the_continuation_alone(run):
    arguments = ("generate", "demo", "--prompt", "The people of the", "--seed", 1, "--max-tokens", 12)
    text, plan = run(*arguments)
    first, second = text.split()[:2]
    assert plan.startswith("model ")
    assert run(*arguments, "--stop", second)[0].split() == [first]


def test_generate_takes_settings_from_file_and_options(run):
    config = ROOT / "configs" / "demo-cpu.yaml"
    _, plan = run("generate", config, "--prompt", "The", "--max_num_seqs=3", "--cache.block-size", 32)
    assert "3 sequences" in plan
    assert "32 tokens" in plan


def test_generate_several_continuations(run):
    text, _ = run("generate", "demo", "--prompt", "The", "--n", 3, "--max-tokens", 4)
    assert [line[:3] for line in text.splitlines() if line.startswith("[")] == ["[0]", "[1]", "[2]"]


def test_generate_a_file(run, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "The people", "max_tokens": 5, "logprobs": 2}\n'
        '{"prompt": [1, 489], "n": 2, "temperature": 1.0, "logit_bias": {"7": 100}}\n'
        '{"prompt": "客", "max_tokens": 0, "prompt_logprobs": 0}\n',
        encoding="utf-8",
    )
    arguments = ("generate", "demo", "--prompts", prompts, "--temperature", 0, "--max-tokens", 3)
    assert run(*arguments, "--out", out)[0] == ""
    assert sorted(tmp_path.iterdir()) == [out, prompts]
    first, second, third, last = (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())
    assert (first["prompt"], first["index"], first["finish_reason"]) == ("The people", 0, "length")
    assert len(first["token_ids"]) == len(first["logprobs"]) == 5
    assert first["logprobs"][0][0]["token_id"] == first["token_ids"][0]
    assert (second["token_ids"], second["index"], third["index"]) == ([7] * 3, 0, 1)
    assert second["prompt"] == [1, 489]
    assert (last["prompt"], last["token_ids"]) == ("客", [])
    assert len(last["prompt_logprobs"]) == last["num_prompt_tokens"]
    assert run(*arguments)[0] == out.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["pipe", "link"])
def test_results_to_a_pipe(run, tmp_path, name):
    prompts, pipe, link = tmp_path / "prompts.jsonl", tmp_path / "pipe", tmp_path / "link"
    prompts.write_text('{"prompt": "x", "max_tokens": 2}\n')
    os.mkfifo(pipe)
    link.symlink_to("pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run("generate", "demo", "--prompts", prompts, "--out", tmp_path / name)
    assert len(json.loads(os.read(reader, 1 << 16))["token_ids"]) == 2
    os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()


@pytest.mark.parametrize("there", [True, False])
def test_results_through_a_link(run, tmp_path, there):
    prompts, link, folder = tmp_path / "prompts.jsonl", tmp_path / "link", tmp_path / "folder"
    prompts.write_text('{"prompt": "x", "max_tokens": 2}\n')
    folder.mkdir()
    if there:
        (folder / "out").write_text("old")
    link.symlink_to("folder/out")
    run("generate", "demo", "--prompts", prompts, "--out", link)
    assert link.is_symlink()
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert len(json.loads((folder / "out").read_text())["token_ids"]) == 2


@pytest.fixture
def aborting(monkeypatch):
    """An LLM that gives up every request after some text."""
    from hybridserve.llm import LLM
    from hybridserve.outputs import CompletionOutput, RequestOutput, StreamAborted

    def stream(llm, prompt, params, **options):
        yield from [" some"] * (params.max_tokens - 1)
        raise StreamAborted("the logits are not finite")

    def generate(llm, prompts, params, **options):
        good = CompletionOutput(0, text=" fine", finish_reason="length")
        bad = CompletionOutput(1, finish_reason="abort", stop_reason="the logits are not finite")
        return [RequestOutput("0", prompt, [1], None, [good, bad]) for prompt in prompts]

    monkeypatch.setattr(LLM, "stream", stream)
    monkeypatch.setattr(LLM, "generate", generate)


@pytest.mark.parametrize(
    ("options", "output", "reason"),
    [
        (["--max-tokens", "1"], "", "the logits are not finite"),
        (["--max-tokens", "2"], " some\n", "the logits are not finite"),
        (["--n", "2"], "[0]  fine\n[1] \n", "[1] was aborted: the logits are not finite"),
    ],
)
def test_an_aborted_request_is_a_failure(aborting, capsys, options, output, reason):
    with pytest.raises(SystemExit) as status:
        main(["generate", "demo", "--prompt", "x", *options])
    shown = capsys.readouterr()
    assert (status.value.code, shown.out) == (1, output)
    assert shown.err.splitlines()[-1] == f"hybridserve: {reason}"


@pytest.mark.parametrize("to_file", [True, False])
def test_aborted_results_of_a_file_are_written_and_counted(aborting, capsys, tmp_path, to_file):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    with pytest.raises(SystemExit) as status:
        main(["generate", "demo", "--prompts", str(prompts), *(["--out", str(out)] if to_file else [])])
    shown = capsys.readouterr()
    results = [json.loads(line) for line in (out.read_text() if to_file else shown.out).splitlines()]
    assert [result["finish_reason"] for result in results] == ["length", "abort"] * 2
    assert status.value.code == 1
    said = "hybridserve: 2 of 4 results ended early (finish_reason abort): the logits are not finite"
    assert [line for line in shown.err.splitlines() if line.startswith("hybridserve")] == [said]


def test_a_fault_in_a_stream_is_not_taken_for_its_end(monkeypatch, capsys):
    from hybridserve.llm import LLM

    def stream(llm, prompt, params, **options):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(LLM, "stream", stream)
    with pytest.raises(SystemExit) as status:
        main(["generate", "demo", "--prompt", "x"])
    shown = capsys.readouterr()
    assert (status.value.code, shown.out) == (1, "")
    assert shown.err.endswith(
        "hybridserve: generate failed; --verbose shows where\n    RuntimeError: a fault of ours\n"
    )


def test_a_text_that_looks_like_an_option_stays_as_it_is(monkeypatch, capsys):
    from hybridserve.llm import LLM

    monkeypatch.setattr(LLM, "stream", lambda llm, prompt, params, **options: iter([prompt]))
    with pytest.raises(SystemExit):
        main(["generate", "demo", "--max-tokens", "1", "--prompt", "--as-is, or not"])
    assert capsys.readouterr().out == "--as-is, or not\n"


def test_generate_a_file_without_a_tokenizer(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(Path(hybridserve.__file__).parent / "models" / "demo", model)
    (model / "tokenizer.json").unlink()
    (tmp_path / "p.jsonl").write_text('{"prompt": [1, 489], "max_tokens": 3, "temperature": 0}\n')
    result = json.loads(run("generate", model, "--prompts", tmp_path / "p.jsonl")[0])
    assert (len(result["token_ids"]), result["text"]) == (3, "")


def test_plan_as_json_and_as_a_table(run):
    plan = json.loads(run("plan", "demo", "--json", "--max_num_seqs", "7")[0])
    assert plan["max_num_seqs"] == 7
    assert plan["parameters_total"] == 2_566_432
    assert 1 <= plan["weight_bytes_per_gpu"] / (2 * 2_566_432) < 1.01  # a few of them are kept in float32
    assert (
        plan["kv_bytes_per_token_per_gpu"] == 2 * 2 * 2 * 32 * 2
    )  # layers, K and V, heads, head size, bytes
    assert run("plan", "demo")[0].startswith("model ")


def test_the_plan_names_what_runs_and_tells_only_of_what_cannot(run, monkeypatch):
    from hybridserve.kernels.attention.torch_native import TorchNative

    rows = dict(line.split(maxsplit=1) for line in run("plan", "demo")[0].splitlines())
    assert rows["attention"].split() == [rows["attention"]]  # its name, and nothing else
    monkeypatch.setattr(TorchNative, "why_not", classmethod(lambda cls, capabilities: "is broken here"))
    rows = dict(
        line.split(maxsplit=1)
        for line in run("plan", "demo", "--kernels.attention", "reference")[0].splitlines()
    )
    no_gpu = "; ".join(f"not {name}: no CUDA device" for name in ("triton", "flash_attn", "flashinfer"))
    assert rows["attention"] == f"reference ({no_gpu}; not torch_native: is broken here)"
    backends = json.loads(run("plan", "demo", "--kernels.attention", "reference", "--json")[0])["backends"]
    reasons = {
        "native": "reference was asked for",
        "triton": "no CUDA device",
        "flash_attn": "no CUDA device",
        "flashinfer": "no CUDA device",
        "torch_native": "is broken here",
    }
    assert backends["attention"] == {
        "name": "reference",
        "rejected": [list(pair) for pair in reasons.items()],
    }
    shown, _ = run("inspect", "demo", "--kernels.attention", "reference")
    assert all(f"not {name}: {reason}" in shown for name, reason in reasons.items())


@pytest.mark.parametrize("to_file", [True, False])
def test_numbers_that_json_does_not_have_are_null(monkeypatch, run, tmp_path, to_file):
    from hybridserve.llm import LLM
    from hybridserve.outputs import CompletionOutput, Logprob, RequestOutput

    def generate(llm, prompts, params, **options):
        row = {5: Logprob(float("nan"), 1, "a"), 6: Logprob(float("-inf"), 2, "b"), 7: Logprob(-0.5, 3, "c")}
        good = CompletionOutput(0, finish_reason="length", logprobs=[row], cumulative_logprob=float("nan"))
        return [RequestOutput("0", prompt, [1, 5], None, [good], [None, row]) for prompt in prompts]

    monkeypatch.setattr(LLM, "generate", generate)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    said, _ = run("generate", "demo", "--prompts", prompts, *(["--out", out] if to_file else []))
    text = out.read_text() if to_file else said

    def refuse(word):
        raise AssertionError(word)

    result = json.loads(text, parse_constant=refuse)
    assert result["cumulative_logprob"] is None
    for row in (result["logprobs"][0], result["prompt_logprobs"][1]):
        assert [entry["logprob"] for entry in row] == [None, None, -0.5]
    assert result["prompt_logprobs"][0] is None


@pytest.mark.parametrize("arguments", [[], ["demo"]])
def test_inspect(run, arguments):
    shown, _ = run("inspect", *arguments)
    for word in ("torch", "threads", "attention", "torch_native", "not reference: "):
        assert word in shown


def test_inspect_models(run):
    assert "JambaForCausalLM" in run("inspect", "--models")[0].splitlines()


def test_interrupt_is_quiet():
    process = subprocess.Popen(
        [*MODULE, "generate", "demo", "--prompt", "The", "--max-tokens", "4000", "--ignore_eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.read(1)  # it writes: the handlers are in place
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def script(*arguments: str) -> str:
    """What the script `hybridserve` consists of, once it is installed."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["hybridserve"]
    module, _, function = entry.partition(":")
    return f"import sys; sys.argv[1:] = {arguments}; from {module} import {function}; {function}()"


@pytest.mark.parametrize(
    "module",
    [
        "hybridserve.cli",
        "argparse",
        "hybridserve.config.keys",
        "torch",
        "hybridserve.engine.planner",
        "hybridserve.kernels.pointwise",  # late, by the planner
    ],
)
@pytest.mark.parametrize("command", [["generate", "demo", "--prompt", "x"], ["inspect"], ["plan", "demo"]])
def test_interrupt_while_modules_are_imported_is_quiet(command, module):
    """As class bodies and extension modules do: the interrupt is turned into another error."""
    code = f"""
import os, signal, sys
class Finder:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
                signal.pthread_sigmask(signal.SIG_BLOCK, [])
            except KeyboardInterrupt:
                raise AttributeError("half imported")
sys.meta_path.insert(0, Finder)
{script(*command)}
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CC": "no-such-compiler"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("milliseconds", [5, 20, 50, 100])
def test_interrupt_at_any_time_is_quiet(milliseconds):
    code = f"""
import os, sys
class Finder:
    def find_spec(name, path, target=None):
        if name == "hybridserve.interrupt":
            os.write(1, b".")
sys.meta_path.insert(0, Finder)
{script("generate", "demo", "--prompt", "x")}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.read(1)  # main() has begun; before that the interpreter decides
    time.sleep(milliseconds / 1000)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == 130


def test_a_closed_pipe_is_quiet():
    process = subprocess.Popen(
        [*MODULE, "generate", "demo", "--prompt", "The", "--max-tokens", "4000", "--ignore_eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert b"Traceback" not in errors
    assert b"Exception ignored" not in errors


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()
