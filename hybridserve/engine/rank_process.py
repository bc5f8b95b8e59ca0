"""A process that is one rank: `python -m hybridserve.engine.rank_process RANK HOST PORT PARENT`.

Started by `ProcessLauncher`, whose end of standard input keeps it alive. Knows the operating system; what a
rank does is `engine.rank`'s.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ends with status 0 when rank 0 closes, with 1 when something went wrong, which rank 0 is told."""
    rank, host, port, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    from hybridserve.distributed.process_group import connect_store
    from hybridserve.engine.rank import serve

    status = 1
    try:
        serve(connect_store(host, port), rank, local_rank=rank)
        status = 0
    except Exception:
        pass  # rank 0 knows, and says it once
    os._exit(status)  # threads that wait for ranks that are gone would hold up an orderly exit


def end_with_parent(parent: int) -> None:
    """Never outlive the process `parent`, not even stopped or stuck in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_with_input, name="hybridserve-lifeline", daemon=True).start()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
