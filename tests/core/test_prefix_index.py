"""The tree against brute force: what is on it, what may go and in which order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hybridserve.core import prefix_index
from hybridserve.core.eviction import HALF_LIFE, priority
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.core.prefix_nodes import Cause, Checkpoint, Node
from tests.harness.scripted import toy_layout


def checkpoint(num_tokens: int, clock: int = 0, slot: int = 1) -> Checkpoint:
    return Checkpoint(num_tokens, slot, 1, 0, Cause.PROMPT, clock)


def evict_block(index: PrefixIndex) -> tuple[int, Checkpoint | None] | None:
    node = index.first_block
    return None if node is None else index.take_block(node)


def evict_checkpoint(index: PrefixIndex) -> Checkpoint | None:
    node = index.first_checkpoint
    return None if node is None else index.take_down(node)


@dataclass
class Model:
    """The same as a dictionary from paths, tuples of letters, to what hangs there."""

    blocks: dict[tuple[int, ...], int] = field(default_factory=dict)
    checkpoints: dict[tuple[int, ...], Checkpoint] = field(default_factory=dict)
    held: dict[tuple[int, ...], int] = field(default_factory=dict)

    def evictable(self) -> set[tuple[int, ...]]:
        """Paths whose block nobody holds, nor one below it."""
        held = {path for path, count in self.held.items() if count}
        return {path for path in self.blocks if not any(other[: len(path)] == path for other in held)}

    def leaves(self) -> set[tuple[int, ...]]:
        parents = {path[:-1] for path in self.blocks}
        return {path for path in self.evictable() if path not in parents}


@pytest.mark.parametrize("seed", range(25))
def test_what_is_evictable_and_in_which_order(seed: int) -> None:
    rng = random.Random(seed)
    layout = toy_layout(8)
    index, model = PrefixIndex(layout), Model()
    size = layout.block_size
    walks: list[list[Node]] = []  # paths of users
    next_block = 1

    def walk(path: tuple[int, ...]) -> list[Node]:
        nodes = [index.root(None)]
        for depth, letter in enumerate(path, start=1):
            nodes.append(index.child(nodes[-1], bytes([letter]), depth * size))
        return nodes

    for _ in range(120):
        action = rng.random()
        index.clock += 1
        if action < 0.45:  # somebody computes a path, and holds some of it
            path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 5)))
            nodes = walk(path)
            walks.append(nodes)
            for depth in range(1, len(path) + 1):
                if path[:depth] not in model.blocks:
                    held = rng.random() < 0.3
                    index.fill(nodes[depth], next_block, is_held=held)
                    model.blocks[path[:depth]], model.held[path[:depth]] = next_block, int(held)
                    next_block += 1
            if path not in model.checkpoints and rng.random() < 0.6:
                model.checkpoints[path] = checkpoint(len(path) * size, index.clock)
                index.hang(nodes[-1], model.checkpoints[path])
        elif action < 0.6 and model.blocks:
            path = rng.choice(sorted(model.blocks))
            if model.held[path]:
                index.unpin(model.blocks[path])
            else:
                index.pin(model.blocks[path])
            model.held[path] ^= 1
        elif action < 0.7 and walks:
            index.leave(walks.pop(rng.randrange(len(walks))))
        elif action < 0.85:
            leaves = model.leaves()
            evicted = evict_block(index)
            assert (evicted is None) == (not leaves)
            if evicted is not None:
                path = next(path for path, block in model.blocks.items() if block == evicted[0])
                assert path in leaves
                # those that save nothing go before those with a checkpoint
                assert path not in model.checkpoints or leaves <= model.checkpoints.keys()
                assert evicted[1] is model.checkpoints.pop(path, None)
                del model.blocks[path], model.held[path]
        else:
            gone = evict_checkpoint(index)
            assert (gone is None) == (not model.checkpoints)
            for path in [path for path, one in model.checkpoints.items() if one is gone]:
                del model.checkpoints[path]
        index.check_integrity()
        assert set(index.blocks) == set(model.blocks.values())
        assert index.num_evictable_blocks == len(model.evictable())
        assert {id(one) for one in index.checkpoints} == {id(one) for one in model.checkpoints.values()}
    for nodes in walks:
        index.leave(nodes)
    for path, block in model.blocks.items():
        if model.held[path]:
            index.unpin(block)
    while evict_block(index) or evict_checkpoint(index):
        pass
    index.check_integrity()
    assert not index._top.children, "nodes are left"


def _chain(index: PrefixIndex, count: int, first: int = 0) -> list[Node]:
    nodes = [index.root(None)]
    for depth in range(1, count + 1):
        key = bytes([first]) if depth == 1 else b"\0"
        nodes.append(index.child(nodes[-1], key, depth * 4))
    return nodes


def many_locked_nodes(count: int = 10_000) -> int:
    """Nodes that are looked at to evict the only block, or none, that may go beside so many that may not."""
    index = PrefixIndex(toy_layout(8))
    visits = 0
    plain = prefix_index.priority

    def counting(*args: int) -> tuple[bool, float]:
        nonlocal visits
        visits += 1
        return plain(*args)

    for block in range(1, count + 1):
        nodes = [index.root(None), index.child(index._top, block.to_bytes(4, "big"), 4)]
        index.fill(nodes[1], block, is_held=block != count)
    prefix_index.priority = counting
    try:
        assert evict_block(index) == (count, None)
        assert evict_block(index) is None
    finally:
        prefix_index.priority = plain
    return visits


def test_f042_locked_nodes_are_not_visited() -> None:
    assert many_locked_nodes() < 10


def test_f042_sees_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PrefixIndex.first_block

    def searching(self: PrefixIndex) -> object:
        for node in self._by_block.values():
            self._leaf_priority(node)
        return plain.fget(self)

    monkeypatch.setattr(PrefixIndex, "first_block", property(searching))
    assert many_locked_nodes() > 10_000


def test_only_what_was_used_is_refreshed() -> None:
    index = PrefixIndex(toy_layout(8))
    nodes = _chain(index, 3)
    for block, node in enumerate(nodes[1:], start=1):
        index.fill(node, block, is_held=False)
    for node in (nodes[1], nodes[3]):
        index.hang(node, checkpoint(node.num_tokens))
    index.clock = 10
    index.touch(nodes[3])
    assert (nodes[3].checkpoint.last_used, nodes[1].checkpoint.last_used) == (10, 0)
    assert index.first_checkpoint is nodes[1]


def test_a_checkpoint_that_is_read_stays() -> None:
    index = PrefixIndex(toy_layout(8))
    nodes = _chain(index, 1)
    index.fill(nodes[1], 1, is_held=True)
    one = checkpoint(4)
    index.hang(nodes[1], one)
    index.hold(one, nodes[1])
    assert evict_checkpoint(index) is None
    assert index.num_evictable_slots == 0
    index.let_go(one, nodes[1])
    assert evict_checkpoint(index) is one


# ---- the policy


def test_the_order_is_that_of_the_formula_at_any_moment() -> None:
    rng = random.Random(0)
    things = [(rng.randint(1, 5000), rng.randint(100, 10_000), rng.randint(0, 1000)) for _ in range(60)]

    def value(thing: tuple[int, int, int], now: int) -> float:
        num_tokens, num_bytes, last_used = thing
        return num_tokens * 0.5 ** ((now - last_used) / HALF_LIFE) / num_bytes

    by_priority = sorted(things, key=lambda thing: priority(*thing))
    for now in (1000, 5000):
        values = [value(thing, now) for thing in by_priority]
        assert values == pytest.approx(sorted(values), rel=1e-6)


def test_what_saves_nothing_goes_first_and_the_oldest_of_it_before_all() -> None:
    order = [(0, 64, 5), (0, 64, 900), (1, 1 << 40, 0), (100, 64, 0)]
    assert sorted(order, key=lambda thing: priority(*thing)) == order
