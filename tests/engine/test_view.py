"""What a watcher of an engine sees, and that looking costs the same whatever is queued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridserve.core.request import SamplingParams
from hybridserve.core.slabs import SlabKind
from hybridserve.engine.view import MAX_REQUESTS, view_of
from tests.harness.engine import Guarded, make_prompts
from tests.harness.models import save_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Counted(dict[str, Any]):
    num_visited = 0

    def values(self) -> Any:
        def counting() -> Iterator[Any]:
            for value in super(Counted, self).values():
                self.num_visited += 1
                yield value

        return counting()


def test_the_oldest_requests_are_seen_and_the_others_not_looked_at(tmp_path: Path) -> None:
    save_model("jamba", tmp_path, seed=1)
    engine = Guarded(tmp_path, checksum=False)
    core = engine.core
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for index, prompt in enumerate(make_prompts([2 + index % 5 for index in range(3 * MAX_REQUESTS)])):
        engine.add(f"r{index}", prompt, params)
    core._live = live = Counted(core._live)
    view = view_of(core)
    assert [each.num_prompt for each in view.requests] == [2 + index % 5 for index in range(MAX_REQUESTS)]
    assert not any(each.is_running for each in view.requests)
    assert live.num_visited == MAX_REQUESTS
    assert view.gauges["num_waiting"] == 3 * MAX_REQUESTS
    assert view.adapters == []
    assert view.slabs == bytes([SlabKind.NULL])
    engine.step()
    view = view_of(core)
    assert view.requests[0].is_running
    assert view.requests[0].num_generated == 1
    assert view.slabs.count(SlabKind.KV) == view.gauges["cache_num_block_slabs"] > 0
    assert view.slabs.count(SlabKind.STATE) == view.gauges["cache_num_slot_slabs"] > 0
