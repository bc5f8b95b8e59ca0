"""Groups of processes: how they are made, and one way to wait for what they exchange.

Knows addresses, the store where ranks meet, gloo and NCCL. Uses no default group of torch, so that two
engines live in one process (D12), and listens at one address only (D14).
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed

from hybridserve.distributed.failure import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_dist: Any = torch.distributed
"""Much of what is used here is exported without types, and NCCL only where torch was built for it."""

ProcessGroup = Any
"""A backend of torch: gloo's or NCCL's, which share methods but no class."""

Store = Any
"""Where ranks meet: a store of torch, which maps names to bytes."""

FOREVER = timedelta(days=3650)
"""For who waits for orders: an engine may be idle for as long as it likes."""
CONNECT_TIMEOUT = timedelta(seconds=120)
"""For ranks that are all up, to reach each other."""
BACKLOG = 1024


def address_of(interface: str) -> str:
    """The IPv4 address that `parallel.interface` means on this machine. ValueError if it means none."""
    addresses = {
        name: [a.address for a in found if a.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    if addresses.get(interface):
        return addresses[interface][0]
    try:
        if ipaddress.IPv4Address(interface).is_loopback:
            return interface
    except ValueError:
        known = ", ".join(sorted(name for name, found in addresses.items() if found))
        raise ValueError(
            f"parallel.interface: {interface!r} is neither an IPv4 address nor an interface of this "
            f"machine ({known})"
        ) from None
    mine = sorted(address for found in addresses.values() for address in found)
    if interface not in mine:
        raise ValueError(
            f"parallel.interface: {interface} is no address of this machine ({', '.join(mine)}); ranks on "
            "several machines are given an interface's name"
        )
    return interface


def open_store(address: str, port: int = 0) -> Store:
    """A new meeting place at `address`, on a free port unless told. Its server runs in this process."""
    listener = socket.create_server((address, port), backlog=BACKLOG)
    port = listener.getsockname()[1]
    # given no socket, the server would listen at every address of this machine
    return _dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=CONNECT_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, port: int) -> Store:
    """A connection of its own to somebody's meeting place. PeerLost if nobody is there."""
    try:
        return _dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    except RuntimeError as error:  # torch's errors of sockets and of time are RuntimeErrors
        raise PeerLost(f"no answer from rank 0 at {address}:{port}: {_first_line(error)}") from None


def make_group(
    store: Store, name: str, ranks: Sequence[int], rank: int, address: str, timeout: timedelta
) -> ProcessGroup:
    """A gloo group of `ranks`, of which this process is `rank`; returns when all of them have come.

    `timeout` is for what is exchanged later, not for their coming.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = CONNECT_TIMEOUT
    options._threads = 1
    try:
        group = _dist.ProcessGroupGloo(prefixed(store, name), ranks.index(rank), len(ranks), options)
    except RuntimeError as error:
        raise PeerLost(f"group {name}: {_first_line(error)}") from None
    group.set_timeout(timeout)
    return group


def make_device_group(
    store: Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    address: str,
    timeout: timedelta,
    device: torch.device,
) -> ProcessGroup:
    """A group for tensors on `device`: NCCL's on a GPU, gloo's elsewhere."""
    if device.type != "cuda":
        return make_group(store, name, ranks, rank, address, timeout)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _dist.ProcessGroupNCCL(prefixed(store, name), ranks.index(rank), len(ranks), options)


@dataclass(slots=True)
class Connection:
    """A group in the hands of somebody who keeps it for long; another one takes its place when ranks have
    been started again."""

    group: ProcessGroup


def wait_for(start: Callable[..., Any], *arguments: Any) -> None:
    """Start an exchange and wait until this rank's part of it is done. PeerLost if it breaks off."""
    try:
        start(*arguments).wait()
    except RuntimeError as error:
        raise PeerLost(_first_line(error)) from None


def waits(thread: int) -> bool:
    """Whether a thread of this process is in `wait_for`, by its identifier."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is wait_for.__code__


def prefixed(store: Store, name: str) -> Store:
    """A part of a meeting place, for whom it is not alone."""
    return _dist.PrefixStore(name, store)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
