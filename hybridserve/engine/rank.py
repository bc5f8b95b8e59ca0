"""One rank other than 0: does what rank 0 says, in the order in which it says it, and nothing else.

Knows messages and a `Worker`; knows no request. Whoever starts the process is a launcher's business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.distributed.failure import PeerLost, RankDisagreement
from hybridserve.distributed.groups import Groups
from hybridserve.distributed.process_group import address_of, waits
from hybridserve.engine.adapter_channel import AdapterChannel
from hybridserve.engine.channel import Channel, Kind
from hybridserve.engine.gpus import rank_device
from hybridserve.engine.rendezvous import Rendezvous
from hybridserve.engine.wire import decode_step, encode_output
from hybridserve.engine.worker import Worker
from hybridserve.lora.loader import Loader

if TYPE_CHECKING:
    from hybridserve.distributed.process_group import Store
    from hybridserve.distributed.topology import Topology
    from hybridserve.engine.model_runner import LaunchedStep

PLACE = struct.Struct("<qqq")  # slot, generation, number of the delivery
NUMBER = struct.Struct("<q")
RECENT = 0.5
"""Seconds after a step during which a load leaves time to the next one."""
DISMISSAL_SECONDS = 1.0

logger = logging.getLogger(__name__)


class Rank:
    """A worker and its ends of the channels."""

    def __init__(self, worker: Worker, groups: Groups, topology: Topology, rendezvous: Rendezvous) -> None:
        self._worker = worker
        self._topology = topology
        self._rendezvous = rendezvous
        self._channel = Channel(groups.control, topology.rank)
        self._adapters = None if groups.adapters is None else AdapterChannel(groups.adapters, topology.size)
        self._staged: dict[int, Any] = {}
        self._last_step = -1
        self._is_sampler = topology.rank == topology.sampler
        self._launched: deque[LaunchedStep] = deque()
        """Steps that are to be answered."""
        self._last_worked = 0.0
        self._threads: list[int] = []
        """Those that do what rank 0 says."""
        self._witness = threading.Thread(target=self._testify, name="hybridserve-witness", daemon=True)

    def serve(self) -> None:
        """Until rank 0 closes. Whatever is raised ends this rank: others can't go on without it."""
        self._threads.append(threading.get_ident())
        self._witness.start()
        loader = Loader("hybridserve-adapters")
        if self._adapters is not None:
            loader.submit(lambda: self._serve_adapters(loader), lambda outcome: None)
        while True:
            kind, payload = self._channel.receive()
            match kind:
                case Kind.STEP:
                    self._launch(payload)
                case Kind.FINISH:
                    self._finish()
                case Kind.PLACE:
                    slot, generation, number = PLACE.unpack(payload)
                    self._worker.place_adapter(slot, generation, self._staged[number])
                case Kind.CLEAR:
                    self._worker.clear_adapter(NUMBER.unpack(payload)[0])
                case Kind.FORGET:
                    self._staged.pop(NUMBER.unpack(payload)[0], None)
                case Kind.CLOSE:
                    loader.close()  # waits for its thread, which is told to end as well
                    self._dismiss_witness()
                    return

    def _testify(self) -> None:
        with contextlib.suppress(RuntimeError):  # rank 0 is gone
            view = Rendezvous(self._rendezvous.store.clone())
            view.testify(self._topology.rank, lambda: all(map(waits, self._threads)))

    def _dismiss_witness(self) -> None:
        """A thread must not wait for a socket while the interpreter ends."""
        with contextlib.suppress(RuntimeError):
            self._rendezvous.inquire()
        self._witness.join(DISMISSAL_SECONDS)

    def _launch(self, payload: memoryview) -> None:
        step = decode_step(payload)
        if step.step_id <= self._last_step:
            raise RankDisagreement(f"was told to run step {step.step_id} after step {self._last_step}")
        self._last_step = step.step_id
        launched = self._worker.launch(step)
        if self._is_sampler:
            self._launched.append(launched)
        self._last_worked = time.monotonic()

    def _finish(self) -> None:
        """Answer the oldest step that was not answered, once it is done."""
        if self._is_sampler:
            self._channel.answer(encode_output(self._launched.popleft().collect()))
            self._last_worked = time.monotonic()

    def _serve_adapters(self, loader: Loader) -> None:
        """On the loader's thread. What breaks it ends the process, whose main thread can't be woken."""

        def pause() -> None:
            loader.leave_time(RECENT - (time.monotonic() - self._last_worked))
            loader.pause()

        assert self._adapters is not None
        self._threads.append(threading.get_ident())
        try:
            while (delivery := self._adapters.receive()) is not None:
                refusal = None
                try:
                    if delivery.is_trial:
                        self._worker.check_adapter(delivery.adapter, pause)
                    else:
                        self._staged[delivery.number] = self._worker.stage_adapter(delivery.adapter, pause)
                except ValueError as error:
                    refusal = str(error)
                if self._adapters.agree(refusal) is not None:
                    self._staged.pop(delivery.number, None)
        except BaseException as error:
            last_words(self._rendezvous, self._topology.rank, error)
            os._exit(1)


def serve(store: Store, rank: int, local_rank: int) -> None:
    """The life of a rank: it comes, loads its share of the model and serves until rank 0 closes.

    What goes wrong is reported to rank 0 and raised.
    """
    rendezvous = Rendezvous(store)
    try:
        assignment = rendezvous.assignment()
        plan, topology = assignment.plan, assignment.topology(rank)
        device = rank_device(plan.device, local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rendezvous.arrive("here", rank)
        groups = Groups.connect(
            store,
            topology,
            address_of(assignment.interface),
            device,
            assignment.step_timeout,
            has_adapters=plan.lora is not None,
        )
        advance = partial(rendezvous.advance, rank)
        advance()
        worker = Worker(
            assignment.model_path, plan, groups.tp, groups.pipeline, groups.adapter_tp, advance, local_rank
        )
        rendezvous.arrive("ready", rank)
        Rank(worker, groups, topology, rendezvous).serve()
    except BaseException as error:
        last_words(rendezvous, rank, error)
        raise


def last_words(rendezvous: Rendezvous, rank: int, error: BaseException) -> None:
    """Tell rank 0 why this one ends, if it is still there to hear."""
    trace = "" if isinstance(error, PeerLost) else traceback.format_exc()
    try:
        rendezvous.report(rank, error, trace)
    except RuntimeError:
        logger.error("rank %d ends, and rank 0 is gone: %s", rank, error)
