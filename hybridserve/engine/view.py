"""What a watcher sees of an engine. Reads numbers between two steps; changes nothing and knows no text.

Costs as much whatever is queued, and one byte a slab: a step is not to wait for somebody who looks.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from hybridserve.core.request import RequestStatus
from hybridserve.engine.messages import EngineView, RequestView

if TYPE_CHECKING:
    from hybridserve.core.request import Request
    from hybridserve.engine.core import EngineCore

MAX_REQUESTS = 64
MAX_ADAPTERS = 64


def view_of(core: EngineCore) -> EngineView:
    now = time.monotonic()
    oldest = itertools.islice(core.unfinished(), MAX_REQUESTS)
    return EngineView(
        gauges=core.gauges(),
        slabs=core.scheduler.cache.slabs.kinds(),
        requests=[_of_request(request, now - arrival) for request, arrival in oldest],
        adapters=core.adapters.views(MAX_ADAPTERS),
    )


def _of_request(request: Request, seconds: float) -> RequestView:
    return RequestView(
        adapter=request.adapter,
        is_running=request.status is RequestStatus.RUNNING,
        num_prompt=request.num_prompt,
        num_computed=request.num_computed,
        num_generated=len(request.output_ids),
        max_tokens=request.params.max_tokens,
        num_preemptions=request.num_preemptions,
        seconds=seconds,
    )
