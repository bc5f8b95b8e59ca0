"""Everything that a machine with a GPU has to tell, in one run of at most eight minutes.

    benchmarks/gpu.sh [--dry] [--parts tests,kernels] [--seconds 470] [--results DIR]

Runs each part in a process of its own with a time limit; whatever becomes of one, the next is run. After
each, gpu.json and gpu.md in benchmarks/results (or DIR), and in $OUT if that is set, say what is known so
far. Exits with 1 if a part failed or was not run.

Knows parts and processes; imports neither torch nor anything that is measured: those may be what fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.budget import Budget, Part
from benchmarks.gpu.records import read
from benchmarks.gpu.report import markdown

ROOT = Path(__file__).resolve().parents[2]

SECONDS = 470.0
"""Of all parts; installing wheels and reporting have the rest of eight minutes."""

PARTS = (
    Part("environment", "environment", 15),
    Part("tests", "tests", 150),
    Part("kernels", "kernels", 95),
    Part("engine-bf16", "engine", 85, ("--weights", "none")),
    Part("engine-int8", "engine", 55, ("--weights", "int8")),
    Part("transformers", "peer", 50),
)

TAIL_LINES = 60
"""Of a failed part's output, kept in the report."""

PASSED, FAILED, OUT_OF_TIME, NOT_BEGUN = "passed", "failed", "out of time", "not begun"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes: no speed is meant")
    parser.add_argument("--parts", help=f"of {','.join(part.name for part in PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all (default: %(default)g)")
    parser.add_argument(
        "--results", type=Path, help="default: benchmarks/results, of a dry run a temporary directory"
    )
    arguments = parser.parse_args()
    try:
        parts = choose(arguments.parts, arguments.seconds)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended, too
    results = arguments.results
    if results is None:
        dry_results = arguments.dry and tempfile.mkdtemp(prefix="hybridserve-gpu-dry-")
        results = Path(dry_results or ROOT / "benchmarks" / "results")
    directories = [results, *([Path(os.environ["OUT"])] if os.environ.get("OUT") else [])]
    with tempfile.TemporaryDirectory(prefix="hybridserve-gpu-", ignore_cleanup_errors=True) as work:
        outcomes = run_all(parts, arguments.seconds, Path(work), directories, dry=arguments.dry)
    print((results / "gpu.md").read_text())
    print(f"results: {', '.join(map(str, directories))}")
    return 0 if all(outcome["outcome"] == PASSED for outcome in outcomes) else 1


def choose(names: str | None, seconds: float) -> list[Part]:
    """The parts that are named, in the order of `PARTS`; where `seconds` are less than they are promised,
    each is promised its share. ValueError for a name that there is not, and for no time at all."""
    wanted = [part.name for part in PARTS] if names is None else names.split(",")
    if unknown := set(wanted) - {part.name for part in PARTS}:
        raise ValueError(f"--parts: there is no {', '.join(sorted(unknown))}")
    if not seconds > 0:
        raise ValueError(f"--seconds: {seconds:g} is no time")
    parts = [part for part in PARTS if part.name in wanted]
    share = min(1.0, seconds / sum(part.seconds for part in parts))
    return [replace(part, seconds=part.seconds * share) for part in parts]


def run_all(
    parts: list[Part], seconds: float, work: Path, directories: list[Path], *, dry: bool
) -> list[dict[str, Any]]:
    """What became of each part. `work` is theirs to share; reports are written to `directories`."""
    budget = Budget(seconds, parts)
    report: dict[str, Any] = {
        "benchmark": "gpu",
        "dry": dry,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "parts": [],
    }
    for part in parts:
        print(f"---- {part.name}", flush=True)
        report["parts"].append(run(part, budget.limit(part), work, dry=dry))
        for directory in directories:
            write(report, directory)
    return report["parts"]


def run(part: Part, limit: float, work: Path, *, dry: bool) -> dict[str, Any]:
    """Run one part for `limit` seconds at most; what became of it, and what it has found."""
    outcome = {
        "part": part.name,
        "limit": round(limit, 1),
        "seconds": 0.0,
        "outcome": NOT_BEGUN,
        "records": [],
    }
    if not limit:
        return outcome
    records, log = work / f"{part.name}.jsonl", work / f"{part.name}.log"
    command = [sys.executable, "-m", f"benchmarks.gpu.{part.module}", *part.options]
    command += ["--records", str(records), "--seconds", f"{limit:.1f}", "--work", str(work)]
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            outcome["outcome"] = PASSED if status == 0 else FAILED
            outcome["status"] = status
        except subprocess.TimeoutExpired:
            outcome["outcome"] = OUT_OF_TIME
        finally:
            with contextlib.suppress(ProcessLookupError):  # its children are in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome["seconds"] = round(time.monotonic() - start, 1)
    outcome["records"] = read(records)
    if outcome["outcome"] != PASSED:
        outcome["tail"] = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        print("\n".join(outcome["tail"]))
    print(f"{part.name}: {outcome['outcome']} after {outcome['seconds']} of {limit:.0f} s", flush=True)
    return outcome


def write(report: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu.json").write_text(json.dumps(report, indent=2) + "\n")
    (directory / "gpu.md").write_text(markdown(report))


def commit() -> str | None:
    """None in a copy that is no repository."""
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
