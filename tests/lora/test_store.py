"""What the store knows: names, versions by content, references, host memory, and reading off the thread."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hybridserve.config.loader import load_config
from hybridserve.engine.planner import build_context, make_plan
from hybridserve.lora import store as store_module
from hybridserve.lora.adapter import read_adapter
from hybridserve.lora.store import MAX_PENDING_REGISTRATIONS, AdapterStore, HostTier
from hybridserve.models.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hybridserve.layers.lora import AdaptableModule
    from tests.harness.adapters import Kit


@pytest.fixture(scope="module")
def modules(kit: Kit) -> dict[str, AdaptableModule]:
    config = load_config(
        str(kit.base),
        None,
        {"lora": {"allow_runtime_loading": True, "roots": [kit.root]}, "max_model_len": 64},
    )
    context = build_context(make_plan(config, kit.base), torch.device("cpu"))
    load_model(kit.base, context)
    assert context.lora is not None
    return context.lora.modules


@pytest.fixture
def root(kit: Kit, tmp_path: Path) -> Path:
    for name in ("A", "B", "C"):
        kit.copy(name, tmp_path / "root" / name)
    return tmp_path / "root"


@pytest.fixture
def store(modules: dict[str, AdaptableModule], root: Path) -> Iterator[AdapterStore]:
    made = make_store(modules, root)
    yield made
    made.close()


def make_store(modules: dict[str, AdaptableModule], root: Path, **options: Any) -> AdapterStore:
    options = {"max_rank": 64, "host_bytes": 2**30, "roots": [root], "allow_runtime_loading": True} | options
    return AdapterStore(modules, torch.float32, **options)


def register(store: AdapterStore, name: str, path: object) -> Any:
    future = store.register(name, path)
    while not future.done():
        store.loader.wait(5)
        store.loader.poll()
    return future.result()


def fetch(store: AdapterStore, identity: str, stage: Any = lambda adapter: adapter) -> Any:
    outcomes: list[Any] = []
    store.fetch(identity, stage, outcomes.append)
    while not outcomes:
        store.loader.wait(5)
        store.loader.poll()
    return outcomes[0]


def replace(directory: Path, by: Path) -> None:
    shutil.rmtree(directory)
    shutil.copytree(by, directory)


def test_a_name_leads_to_what_was_read(store: AdapterStore, root: Path) -> None:
    version = register(store, "x", "A")
    assert store.find("x") is version
    assert (version.rank, version.names, version.num_refs) == (4, {"x"}, 0)
    assert version.source.path == root / "A"
    assert version.num_bytes == store.host.num_bytes > 0
    assert version.device_bytes > 0
    assert version.report.applied


def test_an_unknown_name_lists_what_there_is(store: AdapterStore) -> None:
    with pytest.raises(ValueError, match=r"^adapter: 'x' is unknown; no adapter is loaded$"):
        store.find("x")
    for number in range(10):
        register(store, f"n{number}", "A")
    with pytest.raises(ValueError, match=r"there is n0, n1, n2, n3, n4, n5, n6, n7 and 2 more$") as error:
        store.find("y" * 10_000)
    assert len(str(error.value)) < 300


def test_l048_equal_content_is_one_copy(store: AdapterStore, root: Path) -> None:
    first = register(store, "x", "A")
    num_bytes = store.host.num_bytes
    shutil.copytree(root / "A", root / "same")
    assert register(store, "y", "same") is first
    assert register(store, "x", "A") is first
    assert first.names == {"x", "y"}
    assert store.host.num_bytes == num_bytes
    store.remove("x")
    assert store.find("y") is first
    store.remove("y")
    assert (store.versions, store.host.num_bytes, len(store.host)) == ({}, 0, 0)


def test_l005_a_name_given_other_content_is_another_version(store: AdapterStore) -> None:
    forgotten: list[str] = []
    store.forget = forgotten.append
    old = register(store, "x", "A")
    new = register(store, "x", "B")
    assert old is not new
    assert store.find("x") is new
    assert forgotten == [old.identity]
    assert list(store.versions) == [new.identity]


def test_l052_an_old_version_lives_as_long_as_somebody_uses_it(store: AdapterStore, root: Path) -> None:
    forgotten: list[str] = []
    store.forget = forgotten.append
    old = register(store, "x", "A")
    store.acquire(old.identity)
    store.acquire(old.identity)
    replace(root / "A", root / "B")
    new = register(store, "x", "A")
    assert set(store.versions) == {old.identity, new.identity}
    assert fetch(store, old.identity).identity == old.identity  # its files are gone, its host copy is not
    store.release(old.identity)
    assert forgotten == []
    store.release(old.identity)
    assert forgotten == [old.identity]
    with pytest.raises(KeyError):
        store.release(old.identity)


def test_an_old_version_is_not_pushed_out_of_host_memory(
    modules: dict[str, AdaptableModule], root: Path
) -> None:
    sizes = {name: read_adapter(root / name, modules, max_rank=64).num_bytes for name in "ABC"}
    store = make_store(modules, root, host_bytes=max(sizes["A"], sizes["C"]) + sizes["B"])
    old = register(store, "x", "A")
    store.acquire(old.identity)
    register(store, "x", "B")
    shutil.rmtree(root / "A")
    register(store, "other", "C")  # there is no room for all three
    assert fetch(store, old.identity).identity == old.identity
    store.close()


def test_an_old_version_that_is_not_in_memory_is_read_while_its_files_are_there(
    modules: dict[str, AdaptableModule], root: Path
) -> None:
    size = read_adapter(root / "A", modules, max_rank=64).num_bytes
    store = make_store(modules, root, host_bytes=size + 1)
    old = register(store, "x", "A")
    store.acquire(old.identity)
    register(store, "other", "C")
    store.host.remove(old.identity)
    store.remove("x")
    while store.loader.num_pending:
        store.loader.wait(5)
        store.loader.poll()
    assert old.identity in store.host
    shutil.rmtree(root / "A")
    register(store, "third", "C")  # would push it out, were it not pinned
    assert fetch(store, old.identity).identity == old.identity
    store.close()


def test_an_old_version_whose_files_have_changed_is_refused(store: AdapterStore, root: Path) -> None:
    old = register(store, "x", "A")
    store.acquire(old.identity)
    store.host.remove(old.identity)
    replace(root / "A", root / "B")
    new = register(store, "x", "A")
    outcome = fetch(store, old.identity)
    assert isinstance(outcome, ValueError)
    assert "have changed" in str(outcome)
    assert fetch(store, new.identity).identity == new.identity


def test_a_reference_that_was_never_taken_is_noticed(store: AdapterStore) -> None:
    version = register(store, "x", "A")
    with pytest.raises(RuntimeError, match="more often"):
        store.release(version.identity)


def test_the_host_tier_never_holds_more_than_it_may(modules: dict[str, AdaptableModule], root: Path) -> None:
    sizes = {name: read_adapter(root / name, modules, max_rank=64).num_bytes for name in "ABC"}
    store = make_store(modules, root, host_bytes=sizes["A"] + sizes["C"] - 1)
    versions = {name: register(store, name, name) for name in "ABC"}
    assert store.host.num_bytes <= store.host.capacity
    assert versions["C"].identity in store.host
    assert versions["A"].identity not in store.host  # the least recently used
    reads = store.counters.num_disk_reads
    fetch(store, versions["A"].identity)
    assert store.counters.num_disk_reads == reads + 1
    hits = store.counters.num_host_hits
    fetch(store, versions["A"].identity)
    assert store.counters.num_host_hits == hits + 1
    store.close()


def test_what_is_larger_than_the_host_tier_is_not_kept(
    modules: dict[str, AdaptableModule], root: Path
) -> None:
    store = make_store(modules, root, host_bytes=1)
    version = register(store, "x", "A")
    assert store.host.num_bytes == 0
    assert fetch(store, version.identity).identity == version.identity
    store.close()


def test_pinned_adapters_stay() -> None:
    class Item:
        def __init__(self, identity: str, num_bytes: int) -> None:
            self.identity, self.num_bytes = identity, num_bytes

    tier = HostTier(10)
    assert tier.put(Item("a", 6), pinned=True)
    assert not tier.put(Item("b", 5))
    assert tier.put(Item("c", 4))
    assert tier.put(Item("d", 4))
    assert ("a" in tier, "c" in tier, "d" in tier, tier.num_bytes) == (True, False, True, 10)
    tier.unpin("a")
    assert tier.put(Item("e", 10))
    assert (len(tier), tier.num_bytes) == (1, 10)


def test_l056_a_bad_adapter_changes_nothing(store: AdapterStore, root: Path) -> None:
    version = register(store, "x", "A")
    (root / "B" / "adapter_model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"^adapter 'x': .*adapter_model.safetensors"):
        register(store, "x", "B")
    assert store.find("x") is version
    assert register(store, "y", "C").rank == 8


def test_one_larger_than_the_device_limit_is_refused(modules: dict[str, AdaptableModule], root: Path) -> None:
    store = make_store(modules, root, max_device_bytes=100)
    with pytest.raises(ValueError, match=r"lora\.device_bytes is 100"):
        register(store, "x", "A")
    assert not store.names
    store.close()


def test_runtime_loading_is_off_unless_allowed(modules: dict[str, AdaptableModule], root: Path) -> None:
    store = make_store(modules, root, allow_runtime_loading=False)
    store.register_now("x", root / "A")
    for action in (lambda: store.register("y", "B"), lambda: store.remove("x")):
        with pytest.raises(ValueError, match=r"^lora\.allow_runtime_loading: "):
            action()
    assert list(store.names) == ["x"]
    store.close()


def test_registrations_that_wait_are_bounded(
    store: AdapterStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def slow(*args: Any, **more: Any) -> Any:
        gate.wait(10)
        return read_adapter(*args, **more)

    monkeypatch.setattr(store_module, "read_adapter", slow)
    futures = [store.register(f"n{number}", "B") for number in range(MAX_PENDING_REGISTRATIONS)]
    with pytest.raises(ValueError, match="try again later"):
        store.register("one-more", "B")
    gate.set()
    while store.loader.num_pending:
        store.loader.wait(5)
        store.loader.poll()
    assert len({future.result().identity for future in futures}) == 1
    register(store, "one-more", "B")


def test_what_the_configuration_names_is_reported_by_its_key(
    modules: dict[str, AdaptableModule], root: Path
) -> None:
    store = make_store(modules, root)
    with pytest.raises(ValueError, match=r"^lora\.adapters\.x: .*nothing"):
        store.register_now("x", root / "nothing")
    with pytest.raises(ValueError, match=r"^lora\.adapters\.\.\./x: .* can't be a name"):
        store.register_now("../x", root / "A")
    store.close()
