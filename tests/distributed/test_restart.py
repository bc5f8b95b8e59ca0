"""Ranks that are started again after a failure: nothing that had begun before goes on, for their memory is
empty. (On a real Ray cluster: `test_ray`.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hybridserve.core.request import FinishReason
from hybridserve.distributed.failure import RankFailure
from tests.distributed.engines import add, engine, finish, rank_processes, steps, tokens
from tests.harness.adapters import Kit
from tests.harness.engine import make_prompts

if TYPE_CHECKING:
    from hybridserve.engine.core import EngineCore

PROMPTS = make_prompts([5, 9, 14], vocab_size=128)
KINDS = (None, "A", "B")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    kit = Kit(tmp_path_factory.mktemp("kit"))
    for name in ("A", "B"):
        kit.adapter(name)
    return kit


def kill_rank(core: EngineCore) -> None:
    """And wait until rank 0 has noticed, as between two steps."""
    (process,) = rank_processes()
    process.kill()
    assert core.executor._ranks._failed.wait(5)


def begin(core: EngineCore, prefix: str, kinds: tuple[str | None, ...] = KINDS) -> None:
    for prompt, adapter in zip(PROMPTS, kinds, strict=False):
        add(core, f"{prefix}-{adapter}", prompt, adapter=adapter)


def check_all_abort(core: EngineCore) -> None:
    names = set(core.scheduler.requests)
    with pytest.raises(RankFailure, match=r"rank 1 .* was ended by SIGKILL") as raised:
        finish(core)
    outputs = core.step()
    assert {output.request_id for output in outputs} == names
    assert {output.finish_reason for output in outputs} == {FinishReason.ABORT}
    assert {output.stop_reason for output in outputs} == {str(raised.value)}
    assert not core.has_work


def test_what_had_begun_fails_and_what_comes_later_is_right(kit: Kit) -> None:
    options = {"adapters": {name: str(kit.adapter(name)) for name in ("A", "B")}, "max_loaded": 1}
    with engine(kit.base, can_restart=True, tensor=2, **options) as core:
        begin(core, "r")
        expected = {name: tokens(outputs) for name, outputs in finish(core).items()}
        assert len({tuple(found) for found in expected.values()}) == 3
        for _ in range(2):
            begin(core, "lost", (None, "A"))  # its adapter comes into a slot, or not, as the rank dies
            outputs = steps(core, 4)
            assert tokens(outputs["lost-None"])
            kill_rank(core)
            check_all_abort(core)
            assert not rank_processes()  # none is started for nobody
            begin(core, "r")
            assert {name: tokens(outputs) for name, outputs in finish(core).items()} == expected


def test_ranks_that_fail_before_a_step_are_not_started_again(kit: Kit) -> None:
    with engine(kit.base, can_restart=True, tensor=2) as core:
        for _ in range(2):
            add(core, "r", PROMPTS[0])
            steps(core, 1)
            kill_rank(core)
            check_all_abort(core)
        add(core, "r", PROMPTS[0])
        steps(core, 1)
        kill_rank(core)
        core.executor._has_finished_steps = False
        check_all_abort(core)
        add(core, "r", PROMPTS[0])
        check_all_abort(core)
        assert not rank_processes()
