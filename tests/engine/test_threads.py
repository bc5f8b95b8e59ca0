"""How many threads there are: by affinity, by quotas of both kinds, by what the user says."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from hybridserve.engine.threads import VARIABLE, Cores, limit_threads, usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(8)))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def system(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """What /proc/self and /sys/fs/cgroup would be."""
    proc, groups = root / "proc", root / "groups"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    for name, content in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, Cores(8, "of 8 cores")),
        ("0::/\n", {"cpu.max": "max 100000"}, Cores(8, "of 8 cores")),
        ("0::/\n", {"cpu.max": "250000 100000"}, Cores(3, "of 8 cores, for a quota of 2.5")),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, (2, 2)),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "100000 100000"}, (1, 1)),
        ("0::/\n", {"cpu.max": "10000 100000"}, (1, 0.1)),
        ("0::/\n", {"cpu.max": "1600000 100000"}, Cores(8, "of 8 cores")),
        (
            "4:cpu,cpuacct:/c\n3:memory:/c\n",
            {"cpu,cpuacct/c/cpu.cfs_quota_us": "150000", "cpu,cpuacct/c/cpu.cfs_period_us": "100000"},
            (2, 1.5),
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            Cores(8, "of 8 cores"),
        ),
        ("0::/\n", {"cpu.max": "nonsense"}, Cores(8, "of 8 cores")),
    ],
)
def test_quotas(
    tmp_path: Path,
    eight_cores: None,
    cgroup: str,
    files: dict[str, str],
    expected: Cores | tuple[int, float],
) -> None:
    if isinstance(expected, tuple):
        num, quota = expected
        expected = Cores(num, f"of 8 cores, for a quota of {quota:.3g}")
    assert usable_cores(*system(tmp_path, cgroup, files)) == expected


def test_without_control_groups(tmp_path: Path, eight_cores: None) -> None:
    assert usable_cores(tmp_path / "proc", tmp_path / "groups").num == 8


def test_torch_gets_no_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch, threads: None, eight_cores: None
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    quota = Cores(1, "of 8 cores, for a quota of 1")
    monkeypatch.setattr("hybridserve.engine.threads.usable_cores", lambda: quota)
    torch.set_num_threads(2)
    assert limit_threads() == "1 threads (of 8 cores, for a quota of 1)"
    assert torch.get_num_threads() == 1


def test_what_the_user_says_is_left(monkeypatch: pytest.MonkeyPatch, threads: None) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setattr("hybridserve.engine.threads.usable_cores", lambda: Cores(1, "none"))
    torch.set_num_threads(2)
    assert limit_threads() == f"2 threads ({VARIABLE})"
    assert torch.get_num_threads() == 2


def test_an_engine_on_one_core_has_one_thread() -> None:
    """And `inspect` says so."""
    core = min(psutil.Process().cpu_affinity() or [0])
    script = (
        "import os, sys\n"
        f"os.sched_setaffinity(0, [{core}])\n"
        "from hybridserve.cli import main\n"
        "sys.exit(main(['inspect', 'demo']))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=True,
    )
    assert "1 threads (of 1 core)" in done.stdout
