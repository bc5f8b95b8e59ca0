"""The engine on this machine's CPU: W1-W4 beside transformers, beside what the machine could do at most, and
where the time goes.

    python benchmarks/cpu.py --repeats 5 --json benchmarks/results/cpu.json

Parts, each cell of which is measured in a process of its own (`cpu_cells.py`):

- speed: each workload in float32, bfloat16 and int8: tokens/s, the ratio to transformers' `generate` (static
  batch, padded on the left) in the same dtype, for int8 in bfloat16, and to the faster of its dtypes; and
  the share of the limit. The limit is measured in the same run: memory as large as the weights read once a
  step, products at the best backend's speed (`limits.py`). transformers runs W3 and W4 once, W1 and W2 three
  times at most (`--peer-repeats` lowers both, 0 leaves it out), and W4 in bfloat16 only on a CPU that has
  instructions for it: elsewhere it takes a quarter of an hour.
- where: shares of a run's time by operator, the layers around them, and the host's work.
- host: milliseconds of a decode step of 64 sequences.
- adapters: W2 with 8 adapters mixed against the base model, in the same engine, in turn.
- memory: what weights take of the memory against what they would take if each was there once.
- start: seconds until `generate demo` prints, and how many of them importing torch takes by itself.

Medians of the repeats. Compare numbers only where the load that the report begins and ends with is that of
the benchmark alone. A cell that fails ends the run; what was measured before is in the file all the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import describe, machine
from workloads import WORKLOADS

PARTS = ("speed", "where", "host", "adapters", "memory", "start")
DTYPES = ("float32", "bfloat16", "int8")
PEER_REPEATS = {"W1": 3, "W2": 3, "W3": 1, "W4": 1}
"""Of transformers, at most."""


class Report:
    """Runs cells, and keeps what they found: {part: {dtype or "": {workload or "": {...}}}}."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.results: dict[str, Any] = {}
        self.described = {**describe(args), "benchmark": "cpu", "repeats": args.repeats}

    def cell(self, name: str, **given: Any) -> dict[str, Any]:
        """What one process measured. RuntimeError with what it wrote to standard error, if it failed."""
        given = {"model": self.args.model, "repeats": self.args.repeats, **given}
        command = [sys.executable, __file__, "--cell", name, "--given", json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} {given}: status {done.returncode}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def keep(self, found: dict[str, Any], part: str, dtype: str = "", workload: str = "") -> None:
        self.results.setdefault(part, {}).setdefault(dtype, {})[workload] = found
        if (path := self.args.json) is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            load = {"load_at_the_end": machine()["load"]}
            text = json.dumps(self.described | load | {"results": self.results}, indent=2)
            path.write_text(text + "\n")


def peers(report: Report, dtypes: list[str], workloads: list[str]) -> dict[tuple[str, str], float]:
    """Tokens/s of transformers, by dtype and workload."""
    rates = {}
    has_bfloat16 = "avx512_bf16" in report.described["machine"]["features"]
    for dtype in dict.fromkeys("bfloat16" if dtype == "int8" else dtype for dtype in dtypes):
        for workload in workloads:
            repeats = min(report.args.repeats, PEER_REPEATS[workload], report.args.peer_repeats)
            if repeats and not (workload == "W4" and dtype == "bfloat16" and not has_bfloat16):
                peer = report.cell("transformers", dtype=dtype, workload=workload, repeats=repeats)
                report.keep(peer, "transformers", dtype, workload)
                rates[dtype, workload] = peer["tokens_per_second"]
                print(f"transformers, {dtype} {workload}: {rates[dtype, workload]:.1f} tok/s", flush=True)
    return rates


def speed(report: Report, dtypes: list[str], workloads: list[str]) -> None:
    rates = peers(report, dtypes, workloads)
    print(f"{'':14}{'tok/s':>9}{'limit':>9}{'share':>7}{'peer':>9}{'ratio':>7}{'to best':>9}")
    for dtype in dtypes:
        limits = report.cell("limits", dtype=dtype)
        report.keep(limits, "limits", dtype)
        print(
            f"{dtype}: {limits['bandwidth'] / 1e9:.1f} GB/s over {limits['weight_bytes'] / 1e6:.0f} MB, "
            f"{2 * limits['macs'] / 1e9:.0f} G operations/s"
        )
        for workload in workloads:
            given = {"dtype": dtype, "workload": workload}
            found = report.cell("engine", **given, bandwidth=limits["bandwidth"], macs=limits["macs"])
            peer = rates.get(("bfloat16" if dtype == "int8" else dtype, workload))
            best = max((rate for (_, of), rate in rates.items() if of == workload), default=None)
            mine = found["tokens_per_second"]
            found |= {
                "transformers": peer,
                "ratio": mine / peer if peer else None,
                "ratio_to_best": mine / best if best else None,
            }
            report.keep(found, "speed", dtype, workload)
            print(
                f"{dtype:10}{workload:4}{mine:9.1f}{found['limit']:9.1f}{found['of_limit']:7.1%}"
                f"{_shown(peer, 9, 1)}{_shown(found['ratio'], 7, 2)}{_shown(found['ratio_to_best'], 9, 2)}",
                flush=True,
            )


def _shown(number: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if number is None else f"{number:{width}.{digits}f}"


def where(report: Report, dtypes: list[str], workloads: list[str]) -> None:
    for dtype in dtypes:
        for workload in workloads:
            found = report.cell("where", dtype=dtype, workload=workload)
            report.keep(found, "where", dtype, workload)
            shares = found["shares"].items()
            shown = ", ".join(f"{name} {share:.1%}" for name, share in shares if share >= 0.005)
            print(f"where, {dtype} {workload}: {shown}", flush=True)


def host(report: Report, dtypes: list[str]) -> None:
    for dtype in dtypes:
        found = report.cell("host", dtype=dtype)
        report.keep(found, "host", dtype)
        print(f"a step of 64 sequences, {dtype}, ms: {found}", flush=True)


def adapters(report: Report, dtypes: list[str]) -> None:
    for dtype in dtypes:
        found = report.cell("adapters", dtype=dtype)
        report.keep(found, "adapters", dtype, "W2")
        print(f"W2 with 8 adapters mixed, {dtype}: {found['shares']['mixed']:.1%} of the base model's speed")


def memory(report: Report, dtypes: list[str]) -> None:
    for dtype in dtypes:
        found = report.cell("memory", dtype=dtype)
        report.keep(found, "memory", dtype)
        resident, ideal = (found[name] / 1e6 for name in ("resident_bytes", "ideal_bytes"))
        print(f"memory, {dtype}: {resident:.1f} MB resident of ideally {ideal:.1f}: {found['ratio']:.3f}x")


def start(report: Report) -> None:
    found = report.cell("start")
    report.keep(found, "start")
    shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["medians"].items())
    print(f"first character: {shown}; what isn't torch's import takes {found['beside_torch']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="jamba-100m")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer-repeats", type=int, default=3, help="at most; 0 leaves transformers out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--given", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        from cpu_cells import CELLS

        print(json.dumps(CELLS[args.cell](SimpleNamespace(**args.given))))
        return
    parts, dtypes, workloads = (given.split(",") for given in (args.parts, args.dtypes, args.workloads))
    for what, chosen, known in (("part", parts, PARTS), ("dtype", dtypes, DTYPES)):
        if unknown := set(chosen) - set(known):
            parser.error(f"no {what} {sorted(unknown)}: there are {', '.join(known)}")
    if unknown := set(workloads) - set(WORKLOADS):
        parser.error(f"no workload {sorted(unknown)}: there are {', '.join(WORKLOADS)}")
    args.dtype = args.dtypes
    report = Report(args)
    here = report.described["machine"]
    print(f"{args.model}, {here['processor']}, {here['threads']} threads, load {here['load']}")
    for part in PARTS:
        if part not in parts:
            continue
        if part in ("speed", "where"):
            {"speed": speed, "where": where}[part](report, dtypes, workloads)
        elif part == "start":
            start(report)
        else:
            {"host": host, "adapters": adapters, "memory": memory}[part](report, dtypes)


if __name__ == "__main__":
    main()
