"""`parallel.executor: ray`: a Ray cluster places the ranks on its nodes, watches them and, after a failure,
starts fresh ones.

Knows Ray; nothing else in this project does. Ray is on no path that a step or a request takes: an actor does
one thing, which is to be a rank.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from hybridserve.distributed.process_group import connect_store, open_store
from hybridserve.engine.launchers import Launcher
from hybridserve.engine.threads import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hybridserve.distributed.process_group import Store

PLACEMENT_SECONDS = 60.0
STOP_SECONDS = 5.0


class RayLauncher(Launcher):
    """Uses the cluster that this process is connected to or, as `ray.init()` does, the one of RAY_ADDRESS,
    one that runs on this machine, or a new one.

    Rank 0 stays in this process, for which a place is reserved on its node. The ranks of a stage are packed
    onto as few nodes as possible. The model has to be at the same path on every node, and
    `parallel.interface` the name of an interface that reaches the others.
    """

    can_restart = True

    def __init__(self, *, needs_gpu: bool = False) -> None:
        """ValueError if Ray is not installed."""
        try:
            import ray
        except ImportError:
            raise ValueError(
                "parallel.executor: ray: is not installed; pip install hybridserve[ray]"
            ) from None
        self._ray: Any = ray
        self._needs_gpu = needs_gpu
        self._address = ("", 0)
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._runs: dict[Any, int] = {}
        self._num_local_ranks = 1

    def open_store(self, address: str) -> Store:
        # what Ray starts ends with the thread that started it, which must not be one of ours
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False)
        store = open_store(address)
        self._address = (store.host, store.port)
        return store

    def connect_store(self) -> Store:
        return connect_store(*self._address)

    def start(self, num_ranks: int) -> None:
        ray = self._ray
        nodes = self._place(num_ranks)
        self._num_local_ranks = Counter(nodes)[nodes[0]]
        cores = {node["NodeID"]: int(node["Resources"].get("CPU", 1)) for node in ray.nodes()}
        path = os.pathsep.join(path for path in sys.path if path)
        actor_class = ray.remote(_RankActor)
        for rank in range(1, num_ranks):
            node = nodes[rank]
            local_rank = nodes[:rank].count(node)
            threads = os.environ.get(VARIABLE, str(max(1, cores[node] // nodes.count(node))))
            self._actors[rank] = actor_class.options(
                num_cpus=1,
                num_gpus=1 if self._needs_gpu else 0,
                max_restarts=0,  # a rank that comes back alone finds nobody
                runtime_env={"env_vars": {"PYTHONPATH": path, VARIABLE: threads}},
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            ).remote()
            # Ray shows an actor only the GPUs that are its own
            device = 0 if self._needs_gpu else local_rank
            self._runs[self._actors[rank].run.remote(rank, device, *self._address)] = rank

    def _place(self, num_ranks: int) -> list[str]:
        """Reserve room for all ranks; returns the node of each."""
        ray = self._ray
        here = ray.get_runtime_context().get_node_id()
        own = next(
            name for name in self._node(here)["Resources"] if name.startswith("node:") and "__" not in name
        )
        room = {"CPU": 1.0} | ({"GPU": 1.0} if self._needs_gpu else {})
        bundles = [room | {own: 0.001}, *(room for _ in range(1, num_ranks))]
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(PLACEMENT_SECONDS):
            have = ray.cluster_resources()
            raise RuntimeError(
                f"the cluster has no room for {num_ranks} ranks with {room} each, one of them here; all in "
                f"all it has {have.get('CPU', 0):g} CPU, {have.get('GPU', 0):g} GPU"
            )
        places = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        return [places[rank] for rank in range(num_ranks)]

    def _node(self, node_id: str) -> Any:
        return next(node for node in self._ray.nodes() if node["NodeID"] == node_id)

    def ended(self) -> Mapping[int, str]:
        done, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0)
        return {self._runs[run]: self._how(run) for run in done}

    def _how(self, run: Any) -> str:
        try:
            self._ray.get(run)
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return f"ended: {lines[-1].partition(' Some common causes')[0]}"
        return "ended"

    def wait(self, seconds: float) -> None:
        if self._runs:
            self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=seconds)

    def stop(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self.wait(STOP_SECONDS)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._runs, self._group = {}, {}, None

    @property
    def num_local_ranks(self) -> int:
        return self._num_local_ranks


class _RankActor:
    """One rank, in a process that Ray has started."""

    def run(self, rank: int, local_rank: int, host: str, port: int) -> None:
        """Returns when rank 0 closes."""
        from hybridserve.engine.rank import serve

        serve(connect_store(host, port), rank, local_rank)
