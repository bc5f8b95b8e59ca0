"""Runs the tests that need a GPU, and records what became of each as soon as it is known: those that were
not reached in time are missing, the others are not lost. Knows pytest; knows no test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.gpu.records import Recorder, part_arguments

if TYPE_CHECKING:
    import pytest

FOLDER = "tests/gpu"

MESSAGE_LINES = 40


class Outcomes:
    """A plugin of pytest."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._recorder.add("collected", num_tests=len(session.items))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setting up and tearing down count where they fail."""
        if report.when != "call" and report.outcome == "passed":
            return
        facts = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.outcome != "passed":
            facts["message"] = "\n".join(report.longreprtext.splitlines()[-MESSAGE_LINES:])
        self._recorder.add("test", **facts)


def main() -> int:
    import os

    import pytest

    arguments = part_arguments(__doc__).parse_args()
    recorder = Recorder(arguments.records, arguments.seconds)
    if arguments.dry:
        os.environ["HYBRIDSERVE_GPU_DRY"] = "1"
    # other versions than those that are tested elsewhere may warn of other things
    options = ["-m", "gpu", "-W", "default", "-q", "-p", "no:cacheprovider", "--tb=short"]
    return int(pytest.main([*options, FOLDER], plugins=[Outcomes(recorder)]))


if __name__ == "__main__":
    sys.exit(main())
