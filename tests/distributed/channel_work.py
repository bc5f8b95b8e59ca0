"""What ranks do in `test_channels`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridserve.distributed.failure import RankDisagreement
from hybridserve.engine.adapter_channel import AdapterChannel
from hybridserve.engine.channel import Channel, Kind
from hybridserve.lora.adapter import Adapter, ModuleDelta
from hybridserve.lora.report import LoadReport

if TYPE_CHECKING:
    from tests.distributed.harness import Rank


def payload(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


def pass_messages(rank: Rank, messages: list[tuple[int, int]]) -> tuple[list[tuple[int, bytes]], int]:
    """(kind, size) of each; returns what arrived, and how many bytes went by."""
    channel = Channel(rank.groups.control, rank.topology.rank)
    arrived = []
    for kind, size in messages:
        if rank.topology.rank == 0:
            channel.send(Kind(kind), payload(size))
        else:
            message = channel.receive()
            assert not message.payload.readonly
            arrived.append((int(message.kind), bytes(message.payload)))
    return arrived, channel.num_bytes


def miss_a_message(rank: Rank) -> str:
    channel = Channel(rank.groups.control, rank.topology.rank)
    if rank.topology.rank == 0:
        channel.send(Kind.CLEAR, payload(8))
        return ""
    channel._number = 1
    try:
        channel.receive()
    except RankDisagreement as error:
        return str(error)
    return "received it"


def answer(rank: Rank, sizes: list[int]) -> list[bytes]:
    """From the last rank to rank 0."""
    channel = Channel(rank.groups.control, rank.topology.rank)
    last = rank.topology.size - 1
    if rank.topology.rank == last:
        for size in sizes:
            channel.answer(bytearray(payload(size)))
    return [bytes(channel.receive_answer(last)) for _ in sizes] if rank.topology.rank == 0 else []


def make_adapter() -> Adapter:
    """Tensors of every kind: shared ones, transposed ones, one that is larger than a piece, empty ones."""
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(3, 5, generator=generator)
    stacked = torch.randn(7, 3, 4, generator=generator).permute(2, 0, 1)
    deltas = {f"experts.{i}.up_proj": ModuleDelta(shared, stacked[i], 0.5) for i in range(4)}
    large = torch.arange(3 << 20, dtype=torch.float32).view(1, -1)
    deltas["large"] = ModuleDelta(large, torch.ones(2, 1, dtype=torch.bfloat16), 2.0)
    deltas["dora"] = ModuleDelta(
        shared.half(), torch.zeros(0, 3), 1.0, bias=torch.arange(9.0), magnitude=torch.arange(9).double()
    )
    return Adapter("id", Path("/some/where"), deltas, 3, (7, 8), LoadReport({}, {}), 99)


def deliver(rank: Rank, refusals: list[str | None]) -> dict[str, Any]:
    """What arrived, which tensors are the same one, and what was agreed on."""
    channel = AdapterChannel(rank.groups.adapters, rank.topology.size)
    mine = refusals[rank.topology.rank]
    if rank.topology.rank == 0:
        pauses = []
        channel.deliver(41, make_adapter(), lambda: pauses.append(None), is_trial=mine is not None)
        verdict = channel.agree(mine)
        channel.close()
        return {"verdict": verdict, "num_pauses": len(pauses)}
    delivery = channel.receive()
    assert delivery is not None
    verdict = channel.agree(mine)
    assert channel.receive() is None
    number, adapter, is_trial = delivery
    assert is_trial == (refusals[0] is not None)
    return {
        "number": number,
        "verdict": verdict,
        "facts": (adapter.identity, str(adapter.path), adapter.max_rank, adapter.invocation_tokens),
        "deltas": {
            name: [delta.A, delta.B, delta.scale, delta.bias, delta.magnitude]
            for name, delta in adapter.deltas.items()
        },
        "shared": len({id(delta.A) for name, delta in adapter.deltas.items() if "experts" in name}),
    }
