"""Runs the tests that need a GPU, and records what became of each as soon as it is known: those that were
not reached in time are missing, the others are not lost. Knows pytest; knows no test.

Kernels are compiled when they are first called, one after another in a process, and this takes longer than
all else. So the tests are divided among processes, which share the device, and what they have compiled. One
whose device is lost, as after an access to memory that there is not, goes on in a fresh process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.gpu.records import Recorder, part_arguments, read, start_again_if_lost
from benchmarks.gpu.shapes import DEPLOYMENTS

if TYPE_CHECKING:
    from argparse import Namespace

    import pytest

FOLDER = "tests/gpu"

MESSAGE_LINES = 40

NUM_SHARES = 6
"""Of a machine with cores for as many compilers, on a device with memory for as many tests."""

ALONE = ("test_gpu_offsets", "test_gpu_engine")
"""Modules whose tests stay together: they fill the device, or take long."""


class Outcomes:
    """A plugin of pytest, which runs one share of the tests, but for those that were run before."""

    def __init__(self, recorder: Recorder, share: int, num_shares: int, before: set[str]) -> None:
        self._recorder = recorder
        self._share, self._num_shares = share, num_shares
        self._before = before

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        shares = divide([item.nodeid for item in items], self._num_shares)
        mine = [item for item in items if shares[item.nodeid] == self._share]
        items[:] = [item for item in mine if item.nodeid not in self._before]
        if not self._before:
            self._recorder.add("collected", num_tests=len(items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setting up and tearing down count where they fail."""
        if report.when != "call" and report.outcome == "passed":
            return
        facts = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            facts["message"] = "\n".join(report.longreprtext.splitlines()[-MESSAGE_LINES:])
        self._recorder.add("test", **facts)
        if report.outcome == "failed":
            start_again_if_lost(self._recorder)


def divide(names: list[str], num_shares: int) -> dict[str, int]:
    """Which share each test belongs to. Tests that differ in the model's shape alone have the same kernels:
    they are in one share, so that none is compiled twice."""
    kinds: dict[str, int] = {}
    shares = {}
    for name in names:
        alone = [module for module in ALONE if module in name]
        kind = alone[0] if alone else re.sub("|".join(DEPLOYMENTS), "", name)
        shares[name] = kinds.setdefault(kind, len(kinds)) % num_shares
    return shares


def main() -> int:
    parser = part_arguments(__doc__)
    parser.add_argument("--share", type=int, help="run only this one, in this process")
    arguments = parser.parse_args()
    num_shares = 2 if arguments.dry else max(1, min(NUM_SHARES, len(os.sched_getaffinity(0)) - 1))
    if arguments.share is not None:
        return run_share(arguments, num_shares)
    command = [sys.executable, "-m", "benchmarks.gpu.tests", *sys.argv[1:], "--share"]
    processes = [subprocess.Popen([*command, str(share)]) for share in range(num_shares)]
    return max(abs(process.wait()) for process in processes)


def run_share(arguments: Namespace, num_shares: int) -> int:
    import pytest

    recorder = Recorder(arguments.records, arguments.seconds)
    if arguments.dry:
        os.environ["HYBRIDSERVE_GPU_DRY"] = "1"
    before = {record["name"] for record in read(arguments.records) if record["kind"] == "test"}
    before = before if arguments.again else set()
    # other versions than those that are tested elsewhere may warn of other things
    options = ["-m", "gpu", "-W", "default", "-q", "-p", "no:cacheprovider", "--tb=short"]
    status = int(
        pytest.main([*options, FOLDER], plugins=[Outcomes(recorder, arguments.share, num_shares, before)])
    )
    return 1 if arguments.again else status


if __name__ == "__main__":
    sys.exit(main())
