"""Whose prompts share what has been computed: a key's own, and of those only the ones with the same salt."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from hybridserve.config.schema import ServerConfig
from hybridserve.core.cache_spec import CacheLayout, PagedKVSpec
from hybridserve.core.prefix_index import PrefixIndex
from hybridserve.frontend import protocol
from hybridserve.server import tenants
from hybridserve.server.security import Policy
from hybridserve.server.tenants import MAX_ASKED, NOBODY, TENANT_LENGTH, Tenants, cache_salt
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

ANN, BOB, ADMIN = "sk-ann", "sk-bob", "sk-admin"
KEYS = {"api_keys": [ANN, BOB], "admin_keys": [ADMIN]}
PATHS = ("/v1/completions", "/v1/chat/completions")


def bearer(key: str | None) -> list[tuple[str, str]]:
    return [] if key is None else [("authorization", f"Bearer {key}")]


async def salt_of(
    client: Client, key: str | None, asked: str | None = None, path: str = PATHS[0]
) -> str | None:
    """What the engine is told."""
    body = {"prompt": "hello"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "hello"}]}
    answer = await client.post(path, {**body, "max_tokens": 1, "cache_salt": asked}, bearer(key))
    assert answer.status == 200, answer.body
    added = [each for each in client.engine.fake.received if isinstance(each, protocol.Add)]
    return added[-1].request.cache_salt


@pytest.mark.parametrize("path", PATHS)
def test_s028_each_key_has_a_salt_of_its_own(path):
    async def scenario(client: Client) -> None:
        asked = (None, "a", "b")
        salts = {
            (key, text): await salt_of(client, key, text, path) for key in (ANN, BOB, ADMIN) for text in asked
        }
        assert len(set(salts.values())) == len(salts)
        for (key, text), salt in salts.items():
            assert salt is not None
            assert await salt_of(client, key, text, path) == salt
            assert key not in salt

    serving(scenario, server=KEYS)


def test_s028_no_body_reaches_another_tenant():
    """Even one that knows how salts are written, and all of another's."""

    async def scenario(client: Client) -> None:
        theirs = [await salt_of(client, BOB), await salt_of(client, BOB, "app")]
        forged = [salt for salt in theirs if salt is not None]
        forged += [salt[TENANT_LENGTH:] or ":" for salt in forged] + [":", "::app", "app"]
        for asked in forged:
            assert await salt_of(client, ANN, asked) not in theirs

    serving(scenario, server=KEYS)


def test_s028_who_needs_no_key_is_one_tenant_and_no_other():
    async def scenario(client: Client) -> None:
        admins = await salt_of(client, ADMIN)
        assert await salt_of(client, None) is None
        assert await salt_of(client, "sk-nobody's") is None
        assert admins is not None
        for asked in (admins, f":{admins}", f"{admins}:", "x"):
            assert await salt_of(client, None, asked) not in (admins, f"{admins}:x", None)
        assert await salt_of(client, ADMIN, "x") == f"{admins}:x"

    serving(scenario, server={"admin_keys": [ADMIN]})


def test_no_two_pairs_make_the_same_salt():
    names = [Tenants().name(bytes([byte])) for byte in range(3)]
    asked = [None, "", ":", "a", names[0], f":{names[0]}", f"{names[1]}:a", "a:b", ":a"]
    salts = [cache_salt(*pair) for pair in itertools.product([NOBODY, *names], asked)]
    assert len(set(salts)) == len(salts)
    assert all(len(name) == TENANT_LENGTH for name in names)
    assert len(cache_salt(names[0], "x" * MAX_ASKED) or "") <= 1024


def test_s028_names_are_new_with_each_server_and_say_nothing_of_a_key():
    """Who knows a key, or guesses one, still does not know its tenant's name."""
    config = ServerConfig(api_keys=[ANN])
    headers = {b"authorization": f"Bearer {ANN}".encode(), b"host": b"localhost"}
    first, second = (Policy(config).check("POST", PATHS[0], headers) for _ in range(2))
    assert first != second
    assert {len(first), len(second)} == {TENANT_LENGTH}


@pytest.mark.parametrize("asked", ["", 7, True, ["a"], {"a": 1}, "x" * (MAX_ASKED + 1), "\ud800"])
@pytest.mark.parametrize("path", PATHS)
def test_a_salt_that_is_none_is_refused_by_name(path, asked):
    async def scenario(client: Client) -> None:
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "cache_salt": asked}
        del body["messages" if path == PATHS[0] else "prompt"]
        answer = await client.post(path, body)
        assert answer.status == 400
        assert asked == "\ud800" or answer.error["param"] == "cache_salt"

    serving(scenario)


def test_s028_nothing_in_the_tree_can_be_computed_from_outside():
    """Its keys are the token ids themselves, and what is hashed is hashed by Python, whose secret is new with
    each process; no digest that two servers have in common."""
    layout = CacheLayout.build([PagedKVSpec(num_kv_heads=1, head_dim=16, dtype="float32")], 4, 2**20)
    index = PrefixIndex(layout)
    root = index.root("salt")
    node = index.child(root, b"\x01\0\0\0" * 4, 4)
    assert list(root.children) == [b"\x01\0\0\0" * 4]
    assert node.path == hash((root.path, node.key))


def test_s028_sees_its_fault(monkeypatch):
    """A body's salt takes the place of the tenant's."""
    monkeypatch.setattr(tenants, "cache_salt", lambda tenant, asked: asked or tenant or None)
    for module in ("completions", "chat"):
        monkeypatch.setattr(f"hybridserve.server.{module}.cache_salt", tenants.cache_salt)
    with pytest.raises(AssertionError):
        test_s028_no_body_reaches_another_tenant()
