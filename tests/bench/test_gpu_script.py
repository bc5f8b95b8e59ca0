"""benchmarks/gpu.sh: how time is divided, what becomes of parts that fail, what is reported; and, on a CPU,
every part of it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import environment, rates, shapes, tests
from benchmarks.gpu.budget import LEAST_SECONDS, Budget, Part
from benchmarks.gpu.cases import Bound, Case
from benchmarks.gpu.checks import assert_same
from benchmarks.gpu.records import Recorder, read
from benchmarks.gpu.report import markdown

ROOT = Path(__file__).resolve().parents[2]

script = importlib.import_module("benchmarks.gpu.__main__")


class Hands:
    """Of a clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


PARTS = [Part("a", "a", 20), Part("b", "b", 30), Part("c", "c", 40)]


# ---- time


def test_what_a_part_leaves_goes_to_the_next() -> None:
    clock = Hands()
    budget = Budget(100, PARTS, clock)
    assert budget.limit(PARTS[0]) == 30  # its share, and what nobody was promised
    clock.now += 5
    assert budget.limit(PARTS[1]) == 55
    clock.now += 55
    assert budget.limit(PARTS[2]) == 40
    clock.now += 40
    assert budget.left == 0


def test_no_part_takes_what_another_was_promised() -> None:
    """Whatever parts do, the last has its share and all end in time."""
    clock = Hands()
    budget = Budget(90, PARTS, clock)
    for part in PARTS:
        assert budget.limit(part) == part.seconds
        clock.now += budget.limit(part)
    assert clock.now == 1090


def test_a_part_that_can_do_nothing_any_more_is_not_begun() -> None:
    clock = Hands()
    budget = Budget(90, PARTS, clock)
    clock.now += 20 + 30 - LEAST_SECONDS + 1
    assert budget.limit(PARTS[1]) == 0
    assert budget.limit(PARTS[2]) == 44
    clock.now += 1000
    assert budget.limit(PARTS[2]) == 0


def test_more_is_not_promised_than_there_is() -> None:
    with pytest.raises(ValueError, match="need 90 seconds, and there are 80"):
        Budget(80, PARTS)


def test_all_parts_end_within_eight_minutes() -> None:
    assert sum(part.seconds for part in script.PARTS) <= script.SECONDS < 480


def test_parts_are_chosen_by_name_and_shrink_with_the_time() -> None:
    assert [part.name for part in script.choose("kernels,environment", 470)] == ["environment", "kernels"]
    halved = script.choose(None, sum(part.seconds for part in script.PARTS) / 2)
    assert [part.seconds for part in halved] == [part.seconds / 2 for part in script.PARTS]
    Budget(sum(part.seconds for part in halved), halved)
    for names, seconds in (("kernel", 470), ("", 470), (None, 0), (None, float("nan"))):
        with pytest.raises(ValueError, match=r"--parts: there is no|is no time"):
            script.choose(names, seconds)


# ---- processes


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a part of Python's text; `run` finds it beside the others."""
    folder = tmp_path / "root" / "benchmarks" / "gpu"
    folder.mkdir(parents=True)
    monkeypatch.setattr(script, "ROOT", tmp_path / "root")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def write(text: str) -> Part:
        head = (
            "import subprocess, sys, time\n"
            "from benchmarks.gpu.records import Recorder, part_arguments\n"
            "arguments = part_arguments('').parse_args()\n"
            "recorder = Recorder(arguments.records, arguments.seconds)\n"
        )
        (folder / "made.py").write_text(head + text)
        return Part("made", "made", 1)

    return write


def test_a_part_that_succeeds(module: Any, tmp_path: Path) -> None:
    part = module("recorder.add('found', left=recorder.left > 20, dry=arguments.dry)")
    outcome = script.run(part, 60, tmp_path, dry=True)
    assert outcome["outcome"] == "passed"
    assert outcome["records"] == [{"kind": "found", "left": True, "dry": True}]
    assert "tail" not in outcome


def test_a_part_that_fails_keeps_what_it_found_and_says_why(module: Any, tmp_path: Path) -> None:
    part = module("recorder.add('found')\nraise ValueError('no such luck')")
    outcome = script.run(part, 60, tmp_path, dry=False)
    assert (outcome["outcome"], outcome["status"]) == ("failed", 1)
    assert outcome["records"] == [{"kind": "found"}]
    assert "no such luck" in outcome["tail"][-1]


def test_a_part_that_hangs_is_ended_with_its_children(module: Any, tmp_path: Path) -> None:
    part = module(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "recorder.add('found', child=child.pid)\n"
        "time.sleep(600)"
    )
    outcome = script.run(part, 10, tmp_path, dry=False)
    assert outcome["outcome"] == "out of time"
    assert 10 <= outcome["seconds"] < 60
    (record,) = outcome["records"]
    status = Path(f"/proc/{record['child']}/stat")
    deadline = time.monotonic() + 10  # it was killed: it may still be on its way
    while status.exists() and ") Z " not in status.read_text():  # ended, if not yet buried
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_part_without_time_is_not_begun_and_the_next_one_is(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = module("recorder.add('found')")
    monkeypatch.setattr(Budget, "limit", lambda self, part: 0.0 if part.name == "first" else 60.0)
    parts = [replace(part, name="first"), replace(part, name="second")]
    outcomes = script.run_all(parts, 60, tmp_path, [tmp_path / "a", tmp_path / "b"], dry=False)
    assert [outcome["outcome"] for outcome in outcomes] == ["not begun", "passed"]
    for folder in ("a", "b"):
        report = json.loads((tmp_path / folder / "gpu.json").read_text())
        assert report["parts"] == outcomes
        assert "| second | passed |" in (tmp_path / folder / "gpu.md").read_text()


# ---- records


def test_records_survive_an_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "records"
    assert read(file) == []
    Recorder(file, 60).add("a", number=1)
    with file.open("a") as cut:
        cut.write('{"kind": "b", "num')
    assert read(file) == [{"kind": "a", "number": 1}]


def test_a_piece_that_fails_is_told_and_does_not_end_the_others(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "records", 60)
    with recorder.piece("a", 1, name="x") as found:
        found["seen"] = 1
        raise RuntimeError("broken")
    with recorder.piece("a", 1000, name="y") as found:
        assert found is None
    with recorder.piece("a", 1, name="z") as found:
        found["seen"] = 2
    first, second, third = read(tmp_path / "records")
    assert first == {"kind": "a", "name": "x", "seen": 1, "error": "RuntimeError: broken"}
    assert "it needs 1000" in second["skipped"]
    assert third == {"kind": "a", "name": "z", "seen": 2}
    assert recorder.exit_status() == 1


def test_who_writes_beside_others_writes_whole_lines(tmp_path: Path) -> None:
    text = "Recorder(Path(sys.argv[1]), 60).add('a', text=100_000 * 'x')"
    head = "import sys; from pathlib import Path; from benchmarks.gpu.records import Recorder"
    command = [sys.executable, "-c", f"{head}\nfor _ in range(20): {text}", str(tmp_path / "records")]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, cwd="/") for _ in range(3)
    ]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert [len(record["text"]) for record in read(tmp_path / "records")] == 60 * [100_000]


LOSES_ITS_DEVICE = """
import types
import torch
from benchmarks.gpu.records import read, start_again_if_lost
def synchronize():
    if not arguments.again:
        raise RuntimeError("an illegal memory access was encountered")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
before = [record.get("number") for record in read(arguments.records)]
for number in range(3):
    if number not in before:
        recorder.add("found", number=number, again=arguments.again)
        if number == 1:
            start_again_if_lost(recorder)
"""


def test_a_part_that_loses_its_device_goes_on_without_what_it_did(module: Any, tmp_path: Path) -> None:
    outcome = script.run(module(LOSES_ITS_DEVICE), 60, tmp_path, dry=True)
    assert outcome["outcome"] == "passed"
    kinds = [(record["kind"], record.get("number"), record.get("again")) for record in outcome["records"]]
    assert kinds == [
        *(("found", 0, False), ("found", 1, False), ("device lost", None, None), ("found", 2, True)),
    ]


def test_each_test_is_in_one_share_and_those_with_the_same_kernels_in_the_same() -> None:
    names = [f"k.py::test_a[{shape}-{dtype}]" for shape in shapes.DEPLOYMENTS for dtype in ("x", "y", "z")]
    names += [f"test_gpu_offsets.py::test_{i}" for i in range(5)]
    shares = tests.divide(names, 3)
    assert shares.keys() == {*names}
    assert {*shares.values()} == {0, 1, 2}
    for dtype in "xyz":
        assert len({shares[f"k.py::test_a[{shape}-{dtype}]"] for shape in shapes.DEPLOYMENTS}) == 1
    assert len({share for name, share in shares.items() if "offsets" in name}) == 1


def test_fields_that_a_driver_does_not_know_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(command: list[str]) -> str:
        fields = command[-1].partition("=")[2].split(",")
        if "pstate" in fields:
            return 'Field "pstate" is not a valid field to query.'
        return ", ".join(f"<{field}>" for field in fields)

    monkeypatch.setattr(environment, "output_of", driver)
    found = environment.smi()
    assert isinstance(found, dict)
    assert [*found] == [field for field in environment.GPU_FIELDS if field != "pstate"]
    assert found["name"] == "<name>"
    monkeypatch.setattr(environment, "output_of", lambda command: "nvidia-smi: there is none")
    assert environment.smi() == "nvidia-smi: there is none"


# ---- what is computed of measurements


def test_a_floor_is_that_of_bytes_or_of_operations() -> None:
    device = {"memory": 4e12, "read": 3e12, "bfloat16": 8e14}
    assert rates.floor(4e9, 1e9, "bfloat16", device) == 1e-3
    assert rates.floor(4e6, 8e12, "bfloat16", device) == 1e-2


def test_shapes_are_those_of_a_rank() -> None:
    large = shapes.Shape.load("jamba-large")
    assert (large.heads, large.kv_heads, large.head_dim, large.channels) == (8, 1, 128, 2048)
    assert [shape.name for shape in shapes.shapes(dry=False)] == ["jamba-3b", "jamba-mini", "jamba-large TP8"]


def test_what_is_wrong_has_no_speed() -> None:
    """One wrong element among many, another number, and what is no number."""
    right = torch.linspace(-1, 1, 100)
    case = Case("any", "any", "any", 0, 0, "float32", lambda result: Bound(lambda: result))
    assert_same(case, (right, torch.arange(3)), (right.clone(), torch.arange(3)), torch.float32)
    wrong, nan = right.clone(), right.clone()
    wrong[3] += 0.01
    nan[3] = float("nan")
    for result in ((wrong, torch.arange(3)), (right, torch.arange(1, 4)), (nan, torch.arange(3))):
        with pytest.raises(AssertionError):
            assert_same(case, result, (right, torch.arange(3)), torch.float32)
    with pytest.raises(AssertionError, match="reference"):
        assert_same(case, (nan,), (nan,), torch.float32)


def test_every_number_of_a_report_is_in_its_tables() -> None:
    kernel = {"kind": "kernel", "name": "scan", "shape": "jamba-3b", "us": 20.0, "eager_us": 61.5}
    kernel |= {"floor_us": 15.0, "num_bytes": 6e7, "num_ops": 2e9, "arithmetic": "float32"}
    decode = {"kind": "decode", "batch": 8, "graphs": "always", "tokens_per_second": 1234.0, "step_ms": 6.5}
    parts = {
        "environment": [{"kind": "gpu", "nvidia-smi": {"name": "H200", "pstate": None}}],
        "tests": [
            {"kind": "collected", "num_tests": 3},
            {"kind": "test", "name": "t", "outcome": "passed"},
            {"kind": "test", "name": "u", "outcome": "failed", "message": "E\nno | luck"},
        ],
        "kernels": [kernel, {"kind": "kernel", "name": "top k", "error": "RuntimeError: no"}],
        "engine-bf16": [
            decode | {"roofline_share": 0.61},
            {
                "kind": "prefill",
                "tokens": 2048,
                "graphs": "always",
                "tokens_per_second": 1.0,
                "ttft_ms": 31.5,
            },
            {"kind": "adapters", "batch": 64, "base": 100.0, "mixed": 90.0, "share": 0.9},
            {"kind": "decode", "batch": 256, "graphs": "always", "skipped": "2 s are left"},
        ],
        "transformers": [{"kind": "decode", "batch": 8, "tokens_per_second": 100.0}],
    }
    outcome = {"outcome": "passed", "seconds": 1.0, "limit": 2.0}
    report = {"date": "today", "commit": None, "dry": False}
    report["parts"] = [{"part": name, "records": records, **outcome} for name, records in parts.items()]
    text = markdown(report)
    for row in (
        "| gpu: nvidia-smi | name H200 |",
        "3 tests: 1 passed, 1 failed, 0 skipped, 1 not reached.",
        "| u | no / luck |",
        "| jamba-3b | scan | 20 | 15 | 75% | 3 | 100 | 61.5 |",
        "| engine-bf16 | 8 | always | 1,234 | 6.5 | 61% | 100 | 12.3x |",
        "| engine-bf16 | 2048 | always | 1 | 31.5 |",
        "| 64 | 100 | 90 | 90% |",
        "| kernel top k | failed | RuntimeError: no |",
        "| decode 256 | left out | 2 s are left |",
    ):
        assert row in text
    assert "dry" not in text
    assert "dry run" in markdown(report | {"dry": True})


# ---- all of it


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A copy of the repository that is none."""
    folders = ("benchmarks", "hybridserve", "kernels", "lora", "quant", "tests")
    for name in folders:
        shutil.copytree(
            ROOT / name, tmp_path / "bare" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "bare")
    return tmp_path / "bare"


def gpu_sh(bare: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    command = ["bash", str(bare / "benchmarks" / "gpu.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=whole, cwd="/", check=False)


def test_what_is_missing_is_named_where_it_can_not_be_installed(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find_spec = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'msgspec' else find_spec(name, *more)\n"
    )
    found = gpu_sh(bare, "--dry", PYTHONPATH=str(tmp_path / "without"))
    assert found.returncode == 2
    assert "missing: msgspec; wheels/ has none" in found.stderr


def test_mistakes_are_told_before_anything_runs(bare: Path) -> None:
    found = gpu_sh(bare, "--parts", "kernel")
    assert found.returncode == 2
    assert "there is no kernel" in found.stderr


@pytest.mark.nightly
def test_a_dry_run_does_everything_but_measuring(bare: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    out, results = tmp_path / "out", tmp_path / "results"
    found = gpu_sh(bare, "--dry", "--results", str(results), OUT=str(out))
    report = json.loads((results / "gpu.json").read_text())
    outcomes = {part["part"]: part["outcome"] for part in report["parts"]}
    assert outcomes == {part.name: "passed" for part in script.PARTS}, found.stdout
    assert found.returncode == 0
    assert (out / "gpu.json").read_text() == (results / "gpu.json").read_text()
    records = SimpleNamespace(**{part["part"].replace("-", "_"): part["records"] for part in report["parts"]})
    tests = [record for record in records.tests if record["kind"] == "test"]
    assert len(tests) == sum(record.get("num_tests", 0) for record in records.tests) > 30
    assert {test["outcome"] for test in tests} == {"passed"}
    kinds = {"rates", "kernel", "base", "decode", "prefill", "adapters"}
    everything = records.kernels + records.engine_bf16 + records.transformers
    assert kinds <= {record["kind"] for record in everything}
    assert not [record for part in report["parts"] for record in part["records"] if "skipped" in record]
    assert {record["operator"] for record in records.kernels if record["kind"] == "kernel"} == {
        *("attention", "ssm", "gemm", "moe", "lora", "pointwise")
    }
    text = (results / "gpu.md").read_text()
    for head in ("Environment", "Tests", "Measured limits", "Kernels", "Decode", "Prefill", "Adapters"):
        assert f"## {head}" in text
