"""A rank with a fault, chosen by an environment variable that only tests know: started in the place of
`hybridserve.engine.rank_process`."""

from __future__ import annotations

import ctypes
import os
import time
from functools import partial

from hybridserve.distributed.tp import ProcessGroupTP
from hybridserve.engine import rank_process, rendezvous
from hybridserve.engine.channel import Channel, Kind
from hybridserve.engine.worker import Worker
from tests.distributed.engines import FAULT

AT_STEP = 3


def main() -> None:
    fault = os.environ[FAULT]
    broadcast = ProcessGroupTP.broadcast
    launch, receive, load = Worker.launch, Channel.receive, Worker.__init__

    def faulty_launch(self, step):
        if step.step_id < AT_STEP:
            return launch(self, step)
        if fault == "raise":
            raise ZeroDivisionError("a fault of this test")
        if fault == "hang":
            time.sleep(1000)
        if fault == "stuck":
            ctypes.PyDLL(None).sleep(1000)  # without giving other threads a turn
        if fault == "exit":
            os._exit(17)
        return launch(self, step)

    def faulty_receive(self):
        message = receive(self)
        if fault == "skip" and message.kind == Kind.STEP and self._number == AT_STEP:
            self._number -= 1  # as if one before had been missed
        if fault == "repeat" and message.kind == Kind.STEP and self._number > AT_STEP:
            message.payload[8:16] = (1).to_bytes(8, "little")  # a step id that has been there
        return message

    def faulty_broadcast(self, x):
        """Takes part, and goes on with what it had."""
        mine = x.clone()
        broadcast(self, x)
        return mine

    def faulty_load(self, *arguments, **options):
        if fault == "load":
            raise ValueError("there is no such model here")
        if fault in ("load-hang", "load-slow"):
            *others, advance, local_rank = arguments
            arguments = (*others, partial(dawdle, advance), local_rank)
        load(self, *arguments, **options)

    def dawdle(advance):
        time.sleep(0.15 if fault == "load-slow" else 1000)  # for each tensor
        advance()

    Worker.launch, Channel.receive, Worker.__init__ = faulty_launch, faulty_receive, faulty_load
    if fault == "deaf":
        ProcessGroupTP.broadcast = faulty_broadcast
    if fault == "version":
        rendezvous.VERSIONS = "hybridserve 0.0.1, torch 1.0"
    rank_process.main()


if __name__ == "__main__":
    main()
