"""Several ranks as one executor: rank 0's worker on a thread of this process, the others elsewhere.

Knows the order of messages, and finds out who failed; does not know how ranks are started (`launchers`), nor
what is in a step.

Three threads: the caller's, which waits for results and so is never stuck in an exchange; rank 0's, which
does what every rank does; and one that starts the others, watches them and decides that they have failed.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import traceback
import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from hybridserve.distributed.failure import PeerLost, RankDisagreement, RankFailure
from hybridserve.distributed.groups import Groups
from hybridserve.distributed.process_group import address_of
from hybridserve.engine.adapter_channel import AdapterChannel
from hybridserve.engine.channel import Channel, Kind
from hybridserve.engine.gpus import rank_device
from hybridserve.engine.job_thread import JobThread
from hybridserve.engine.launchers import threads_per_rank
from hybridserve.engine.rank import NUMBER, PLACE
from hybridserve.engine.rendezvous import Rendezvous
from hybridserve.engine.wire import decode_output
from hybridserve.engine.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from hybridserve.engine.input_builder import StepInput
    from hybridserve.engine.launchers import Launcher
    from hybridserve.engine.model_runner import LaunchedStep, StepOutput
    from hybridserve.engine.rendezvous import Assignment
    from hybridserve.lora.adapter import Adapter
    from hybridserve.lora.layers import PlacedAdapter

T = TypeVar("T")

POLL_SECONDS = 0.02
GRACE_SECONDS = 1.0
"""After a first sign of failure, for the rank that is its cause to be heard."""
CLOSE_SECONDS = 5.0
ARRIVAL_SECONDS = 600.0
"""For a rank to come: from then on it is watched, and may take as long as it likes to load."""


class Ranks:
    """All ranks of an engine from their start to their end, as rank 0 has them. After a failure nothing works
    any more and every call raises it; the other ranks have ended then, or will at once."""

    def __init__(self, assignment: Assignment, launcher: Launcher, before: Ranks | None = None) -> None:
        """Start them and load the model. Rank 0's share of it is taken from `before`, which has failed.

        Raises RankFailure, or what loading raised on rank 0; then nothing is left running.
        """
        self.failure: RankFailure | None = None
        self._launcher = launcher
        self._topology = assignment.topology(0)
        self._step_timeout = assignment.step_timeout
        self._rendezvous = Rendezvous(launcher.open_store(address_of(assignment.interface)))
        self._rendezvous.assign(assignment)
        self._since: dict[str, float] = {}  # what rank 0 is doing that others take part in, and since when
        self._loading: dict[int, tuple[int, float]] = {}  # ranks that load: their progress, and since when
        self._symptom: BaseException | None = None
        self._failed = threading.Event()
        self._ending = threading.Event()
        self._staging = threading.Lock()
        self._numbers = itertools.count()
        self._forgotten: deque[int] = deque()
        self._launched: deque[LaunchedStep] = deque()  # rank 0's thread's
        self._groups: Groups | None = None
        self._jobs = JobThread("hybridserve-rank-0")
        # the thread that starts processes has to outlive them: the system ends them with it
        self._watcher = threading.Thread(target=self._watch, name="hybridserve-ranks", daemon=True)
        self._watcher.start()
        try:
            self._wait_for("here", ARRIVAL_SECONDS)
            self._groups = self._call(lambda: self._connect(assignment, before))
            self._channel = Channel(self._groups.control, 0)
            self._adapters = None
            if self._groups.adapters is not None:
                self._adapters = AdapterChannel(self._groups.adapters, self._topology.size)
            self._loading = dict.fromkeys(range(self._topology.size), (-1, time.monotonic()))
            self.worker: Worker = self._call(lambda: self._load(assignment, before))
            self._rendezvous.arrive("ready", 0)
            self._wait_for("ready")
            self._loading = {}
        except BaseException:
            self.close()
            raise

    def _connect(self, assignment: Assignment, before: Ranks | None) -> Groups:
        threads = threads_per_rank(self._launcher.num_local_ranks)
        if threads is not None:
            torch.set_num_threads(threads)  # of this thread; those of the caller stay as they are
        plan = assignment.plan
        groups = Groups.connect(
            self._rendezvous.store,
            self._topology,
            address_of(assignment.interface),
            rank_device(plan.device, 0),
            assignment.step_timeout,
            has_adapters=plan.lora is not None,
        )
        if before is None or before._groups is None:
            return groups
        return before._groups.hand_over(groups)

    def _load(self, assignment: Assignment, before: Ranks | None) -> Worker:
        if before is not None:
            return before.worker
        assert self._groups is not None
        groups, advance = self._groups, partial(self._rendezvous.advance, 0)
        return Worker(
            assignment.model_path, assignment.plan, groups.tp, groups.pipeline, groups.adapter_tp, advance
        )

    def _wait_for(self, place: str, seconds: float = math.inf) -> None:
        deadline = time.monotonic() + seconds
        while missing := self._rendezvous.missing(place, self._topology):
            if self._failed.wait(POLL_SECONDS):
                raise self._raised()
            if time.monotonic() > deadline:
                raise RankFailure(f"rank {missing[0]} has not come within {seconds:g} s")

    # ---- what all ranks do, in order

    def submit(self, step: StepInput, payload: bytearray) -> Future[None]:
        """Launch a step everywhere; `payload` is the step for the others. One that has not begun may be
        cancelled."""
        return self._jobs.submit(partial(self._together, partial(self._launch, step, payload)))

    def finish(self) -> Future[StepOutput]:
        """The result of the oldest step that was launched and not finished, of which there is one when it
        comes to that. May be cancelled."""
        return self._jobs.submit(partial(self._together, self._finish))

    def drop(self) -> None:
        """Finish what was launched, for nobody."""
        self._jobs.submit(partial(self._together, self._drop))

    def _launch(self, step: StepInput, payload: bytearray) -> None:
        self._forget()
        self._channel.send(Kind.STEP, payload)
        self._launched.append(self.worker.launch(step))

    def _finish(self) -> StepOutput:
        launched = self._launched.popleft()
        sampler = self._topology.sampler
        if sampler == 0:
            return launched.collect()
        self._channel.send(Kind.FINISH)
        launched.collect()
        output = decode_output(self._channel.receive_answer(sampler))
        if output.step_id != launched.step_id:
            raise RankDisagreement(
                f"rank {sampler} answered step {output.step_id} to step {launched.step_id}"
            )
        return output

    def _drop(self) -> None:
        while self._launched:
            self._finish()

    def place_adapter(self, slot: int, generation: int, staged: StagedOnRanks) -> None:
        def place() -> None:
            self._forget()
            self._channel.send(Kind.PLACE, PLACE.pack(slot, generation, staged.number))
            self.worker.place_adapter(slot, generation, staged.placed)

        self._call(partial(self._together, place))

    def clear_adapter(self, slot: int) -> None:
        def clear() -> None:
            self._forget()
            self._channel.send(Kind.CLEAR, NUMBER.pack(slot))
            self.worker.clear_adapter(slot)

        self._call(partial(self._together, clear))

    def _forget(self) -> None:
        """Of adapters that were staged: nobody here can place them any more."""
        while self._forgotten:
            self._channel.send(Kind.FORGET, NUMBER.pack(self._forgotten.popleft()))

    def _together(self, work: Callable[[], T]) -> T:
        """Work in which others take part: if it fails, the ranks are not where rank 0 is any more."""
        self._since["step"] = time.monotonic()
        try:
            return work()
        except BaseException as error:
            raise self._fail(error) from error
        finally:
            del self._since["step"]

    def _call(self, work: Callable[[], T]) -> T:
        """On rank 0's thread."""

        def guarded() -> T:
            try:
                return work()
            except PeerLost as error:
                raise self._fail(error) from None

        return self._jobs.submit(guarded).result()

    # ---- beside steps

    def check_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> None:
        """ValueError if a rank would refuse it."""
        self._hand_out(adapter, pause, self.worker.check_adapter, is_trial=True)

    def stage_adapter(self, adapter: Adapter, pause: Callable[[], None]) -> StagedOnRanks:
        """ValueError if a rank refuses it."""
        staged = StagedOnRanks(*self._hand_out(adapter, pause, self.worker.stage_adapter, is_trial=False))
        weakref.finalize(staged, self._forgotten.append, staged.number).atexit = False
        return staged

    def _hand_out(
        self,
        adapter: Adapter,
        pause: Callable[[], None],
        take: Callable[[Adapter, Callable[[], None]], T],
        *,
        is_trial: bool,
    ) -> tuple[int, T]:
        """Let the others have it, and this rank `take` it. Returns the number of the delivery and what was
        made of it here."""

        def working() -> None:
            pause()
            self._since["adapter"] = time.monotonic()

        assert self._adapters is not None
        with self._staging:
            if self.failure is not None or self._ending.is_set():
                raise self._raised()
            self._since["adapter"] = time.monotonic()
            number, refusal = next(self._numbers), None
            taken: list[T] = []
            try:
                self._adapters.deliver(number, adapter, working, is_trial=is_trial)
                try:
                    taken.append(take(adapter, working))
                except ValueError as error:
                    refusal = str(error)
                refusal = self._adapters.agree(refusal)
            except BaseException as error:
                raise self._fail(error) from error
            finally:
                del self._since["adapter"]
        if refusal is not None:
            raise ValueError(refusal)
        return number, taken[0]

    # ---- failure

    def _watch(self) -> None:
        """The life of the thread that starts the others and sees them end."""
        try:
            self._launcher.start(self._topology.size)
            view = Rendezvous(self._launcher.connect_store())
            while not self._ending.wait(POLL_SECONDS):
                if self._is_ill(view):
                    self._end_all(*self._find_cause(view))
                    return
            if self._groups is not None:  # else they have not begun to listen
                self._launcher.wait(CLOSE_SECONDS)
        except BaseException as error:
            self._end_all(f"the ranks can't be started or watched: {error}", traceback.format_exc())
        finally:
            self._launcher.stop()

    def _is_ill(self, view: Rendezvous) -> bool:
        late = time.monotonic() - self._step_timeout
        if any(since < late for since in list(self._since.values())):
            self._symptom = self._symptom or TimeoutError()
        if self._stalled(view):
            self._symptom = self._symptom or TimeoutError()
        return self._symptom is not None or bool(self._launcher.ended()) or view.num_reports > 0

    def _stalled(self, view: Rendezvous) -> list[int]:
        """Ranks that load, and have not got on for too long. However slow it is, loading is not limited."""
        now, loading = time.monotonic(), self._loading
        for rank, (before, _) in list(loading.items()):
            if (progress := view.progress(rank)) != before:
                loading[rank] = progress, now
        late = [rank for rank, (_, since) in loading.items() if since < now - self._step_timeout]
        return [rank for rank in late if not view.has_arrived("ready", rank)]

    def _find_cause(self, view: Rendezvous) -> tuple[str, str]:
        """What to say, and a traceback if there is one. The first sign is often not the cause: all who talk
        to a rank that dies fail, too."""
        symptom, describe = self._symptom, self._launcher.describe
        if symptom is not None and not isinstance(symptom, PeerLost | TimeoutError):
            trace = "".join(traceback.format_exception(symptom))
            return f"rank 0: {type(symptom).__name__}: {symptom}", trace
        deadline = time.monotonic() + GRACE_SECONDS
        view.inquire()
        while True:
            ended = self._launcher.ended()  # before reports: a rank reports before it ends
            reports = view.reports(self._topology)
            for rank, report in reports.items():
                if report.is_cause:
                    return f"{describe(rank)}: {report.reason}", report.trace
            for rank, how in ended.items():
                if rank not in reports:
                    return f"{describe(rank)} {how}", ""
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_SECONDS)
        if stalled := [rank for rank in self._stalled(view) if rank not in reports]:
            who = ", ".join(map(describe, stalled))
            return f"{who} loaded nothing for {self._step_timeout:g} s (parallel.step_timeout)", ""
        quiet = [rank for rank in range(1, self._topology.size) if rank not in reports]
        silent = [rank for rank in quiet if not view.has_arrived("waiting", rank)] or quiet
        who = ", ".join(map(describe, silent)) or "no rank"
        if isinstance(symptom, TimeoutError) or "imed out" in str(symptom):
            return f"{who} did not answer within {self._step_timeout:g} s (parallel.step_timeout)", ""
        return f"{who} is not to be reached: {symptom}", ""

    def _end_all(self, reason: str, trace: str) -> None:
        failure = RankFailure(reason)
        if trace:
            failure.add_note(trace)
        self.failure = failure
        self._failed.set()
        self._jobs.abandon(failure)
        self._launcher.stop()
        if self._groups is not None:
            self._groups.abort()  # whoever is still in an exchange here

    def _fail(self, error: BaseException) -> BaseException:
        """Called where something went wrong: returns what to raise when it is known what."""
        if isinstance(error, RankFailure):
            return error
        self._symptom = self._symptom or error
        self._failed.wait(GRACE_SECONDS + CLOSE_SECONDS)
        return self._raised()

    def _raised(self) -> RankFailure:
        return self.failure or RankFailure("the ranks of this engine have been closed")

    def close(self, *, keep_worker: bool = False) -> None:
        """End all ranks; again, nothing happens. `keep_worker`: for whoever starts others."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self.failure is None and self._groups is not None:
            self._jobs.submit(self._say_goodbye)
        self._jobs.close(2 * CLOSE_SECONDS)
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        if not keep_worker:
            vars(self).pop("worker", None)  # there may be none yet

    def _say_goodbye(self) -> None:
        self._channel.send(Kind.CLOSE)
        if self._adapters is not None:
            with self._staging:
                self._adapters.close()


@dataclass(slots=True, eq=False, weakref_slot=True)
class StagedOnRanks:
    """An adapter that every rank has its share of, by the number of its delivery."""

    number: int
    placed: PlacedAdapter
    adapter: Adapter | None = None
    """Kept where fresh ranks may need it."""
