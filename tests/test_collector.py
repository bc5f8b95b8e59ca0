"""The garbage collector rests while modules are loaded, and is afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from hybridserve.collector import collector_rests
from hybridserve.interrupt import interrupt_exits_at_once


@pytest.mark.parametrize("keeps", [True, False])
def test_it_rests_within_and_works_after(keeps: bool) -> None:
    before = gc.get_freeze_count()
    with collector_rests(keeps=keeps):
        with collector_rests(keeps=keeps):
            assert not gc.isenabled()
        assert not gc.isenabled()  # the outer one is not over
    assert gc.isenabled()
    assert (gc.get_freeze_count() > before) == keeps
    gc.unfreeze()


def test_an_import_that_fails_brings_it_back() -> None:
    with pytest.raises(KeyError), collector_rests():
        raise KeyError
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    try:
        with collector_rests(keeps=True):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_command_line_imports_without_it() -> None:
    with interrupt_exits_at_once():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.unfreeze()


def test_a_library_freezes_nothing_of_its_users() -> None:
    script = (
        "import gc\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "from hybridserve import LLM\n"
        "assert len(seen) < 60, len(seen)\n"  # two a look; hundreds where it does not rest
        "assert gc.isenabled() and gc.get_freeze_count() == 0\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
