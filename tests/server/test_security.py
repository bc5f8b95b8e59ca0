"""Who may call what: routes, keys, hosts and origins; and that nothing secret is told to anybody."""

from __future__ import annotations

import hmac
import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.routing import APIRoute

from hybridserve.config.loader import ConfigError, load_config
from hybridserve.config.schema import ServerConfig
from hybridserve.server import security
from hybridserve.server.app import _ROUTES
from hybridserve.server.security import ROUTES, Access, Keys, check_exposure, is_loopback
from tests.harness.asgi import serving

if TYPE_CHECKING:
    from tests.harness.asgi import Client

USER, OTHER, ADMIN = "sk-user-1", "sk-user-2", "sk-admin"
KEYS = {"api_keys": [USER, OTHER], "admin_keys": [ADMIN]}
PROMPT = {"prompt": "hello", "max_tokens": 1}
UNKNOWN = ("/nowhere", "/v1/", "/docs", "/redoc", "/playground", "/playground/", "/playground/static/main.js")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


def method_of(path: str) -> str:
    return next(("GET" if route.body is None else "POST" for route in _ROUTES if route.path == path), "GET")


def test_s023_every_route_is_in_exactly_one_class():
    async def scenario(client: Client) -> None:
        served = {route.path for route in client.app._app.routes if isinstance(route, APIRoute)}
        page = {path for path in served if path == "/" or path.startswith("/playground/")}
        assert served == ROUTES.keys() - {"/openapi.json"}
        assert all(isinstance(access, Access) for access in ROUTES.values())
        public = {path for path, access in ROUTES.items() if access is Access.PUBLIC}
        assert public == {"/health", "/health/live", "/health/ready"} | page - {"/playground/state"}
        admin = {path for path, access in ROUTES.items() if access is Access.ADMIN}
        assert admin == {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}

    serving(scenario)


def test_s023_a_route_that_nobody_classified_is_not_served(monkeypatch):
    async def scenario(client: Client) -> None:
        monkeypatch.setattr("hybridserve.server.app.ROUTES", {**ROUTES, "/other": Access.USER})
        with pytest.raises(RuntimeError, match="/other"):
            type(client)(client.engine, client.service)

    serving(scenario)


@pytest.mark.parametrize("key", [None, "", "wrong", USER[:-1], USER + "x", USER.upper(), "é"])
def test_s023_without_a_key_only_health_and_the_page_answer(key):
    async def scenario(client: Client) -> None:
        for path, method in itertools.product([*ROUTES, *UNKNOWN], METHODS):
            answer = await client.call(method, path, None, [] if key is None else bearer(key))
            if ROUTES.get(path) is Access.PUBLIC:
                assert answer.status in (200, 405)
            else:
                assert answer.status == 401, (method, path, answer.body)
                if method != "HEAD":
                    assert answer.error["type"] == "authentication_error"

    serving(scenario, server=KEYS)


def test_s023_with_a_key_of_each_class():
    async def scenario(client: Client) -> None:
        for path, key in itertools.product(ROUTES, (USER, OTHER, ADMIN)):
            method = method_of(path)
            body = {} if method == "POST" else None
            answer = await client.call(method, path.replace("{id:path}", "demo"), body, bearer(key))
            is_allowed = ROUTES[path] is not Access.ADMIN or key == ADMIN
            assert (answer.status == 403) is not is_allowed, answer.body
            assert answer.status not in (401, 404, 405, 500)

    serving(scenario, server=KEYS)


def test_keys_in_other_words_are_none():
    async def scenario(client: Client) -> None:
        for words in ("{}", "Basic {}", "bearer{}", "Bearer  {} x", "Token {}", "Bearer {},{}", "Bearer"):
            header = words.format(USER, OTHER)
            assert (await client.get("/v1/models", [("authorization", header)])).status == 401, header
        assert (await client.get("/v1/models", [("authorization", f"bearer {USER}")])).status == 200
        assert (await client.get("/v1/models", [("x-api-key", USER)])).status == 401

    serving(scenario, server=KEYS)


@pytest.mark.parametrize(
    ("server", "status"),
    [
        ({}, 400),
        ({"api_keys": [USER]}, 401),
        ({"admin_keys": [ADMIN]}, 401),
        ({"host": "0.0.0.0", "insecure": True}, 403),
    ],
    ids=["local", "users", "admins", "insecure"],
)
def test_s024_who_may_change_adapters_without_a_key(server, status):
    async def scenario(client: Client) -> None:
        assert (await client.post("/v1/load_lora_adapter", {})).status == status
        if "api_keys" in server:
            answer = await client.post("/v1/load_lora_adapter", {}, bearer(USER))
            assert answer.status == 403
            assert "there is none" in answer.error["message"]

    serving(scenario, server=server)


SPELLINGS = (
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/health/../v1/models",
    "/V1/models",
    "/health/%2e%2e/v1/models",
    "/v1/models?a",
    "/health\x00",
    "/metrics/",
    "/v1/models;a",
    " /v1/models",
)


def test_other_spellings_of_a_path_open_nothing():
    async def scenario(client: Client) -> None:
        for path in SPELLINGS:
            assert (await client.get(path)).status == 401, path
            assert (await client.get(path, bearer(USER))).status == 404, path

    serving(scenario, server=KEYS)


def test_s021_all_keys_are_compared_whichever_was_right(monkeypatch):
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: seen.append((a, b)) or real(a, b))
    config = load_config("demo", overrides={"server": {"api_keys": ["a", "bb", "ccc"]}}).server
    keys = Keys(config.api_keys)
    for key, is_right in [("a", True), ("bb", True), ("ccc", True), ("d", False), ("", False)]:
        seen.clear()
        assert keys.have(key) is is_right
        assert len(seen) == 3
        assert {len(part) for pair in seen for part in pair} == {32}  # digests: no length is told


HOSTS = {
    "localhost": 200,
    "localhost:8000": 200,
    "LOCALHOST:1": 200,
    "127.0.0.1:8000": 200,
    "[::1]:8000": 200,
    "evil.example": 403,
    "evil.example:8000": 403,
    "localhost.evil.example": 403,
    "127.0.0.1.evil.example": 403,
    "localhost@evil.example": 403,
    "": 403,
}


def test_s024_hosts_of_a_server_on_loopback():
    async def scenario(client: Client) -> None:
        for (host, status), path in itertools.product(HOSTS.items(), ("/v1/models", "/metrics", "/nowhere")):
            expected = 404 if status == 200 and path == "/nowhere" else status
            assert (await client.get(path, [("host", host)])).status == expected, host
            assert (await client.get("/health", [("host", host)])).status == 200

    serving(scenario)


def test_s024_hosts_that_were_listed():
    async def scenario(client: Client) -> None:
        for host, status in [("api.example", 200), ("API.example:443", 200), ("localhost", 403)]:
            assert (await client.get("/v1/models", [("host", host)])).status == status

    async def anywhere(client: Client) -> None:
        assert (await client.get("/v1/models", [("host", "10.1.2.3"), *bearer(USER)])).status == 200

    serving(scenario, server={"allowed_hosts": ["api.example"]})
    serving(anywhere, server={"host": "0.0.0.0", "api_keys": [USER]})


ORIGINS = (
    *("http://evil.example", "null", "", "http://localhost:9000", "file://", "x", "ftp://localhost:8000"),
    *("http://[::1", "http://[not an address]", "http://localhost:8000/", "http://a@localhost:8000"),
)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_s024_pages_of_other_origins_change_nothing(method):
    async def scenario(client: Client) -> None:
        for path, origin in itertools.product(
            ("/v1/completions", "/v1/load_lora_adapter", "/health"), ORIGINS
        ):
            answer = await client.call(method, path, PROMPT, [("origin", origin)])
            assert answer.status == 403
            assert answer.error["code"] == "origin_not_allowed"
            assert "access-control-allow-origin" not in answer.headers
        assert len(client.engine.fake.received) == 1, "the engine was asked"

    serving(scenario)


def test_a_fault_of_the_gate_is_an_error_like_any_other(monkeypatch, caplog):
    async def scenario(client: Client) -> None:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("xylophone")

        monkeypatch.setattr(security.Policy, "check", fail)
        answer = await client.get("/health")
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "x-request-id" in answer.headers

    with caplog.at_level(logging.INFO):
        serving(scenario)
    assert "ZeroDivisionError in fail" in caplog.text
    assert "xylophone" not in caplog.text


def test_s024_no_cors_by_default():
    async def scenario(client: Client) -> None:
        ask = [("origin", "http://evil.example"), ("access-control-request-method", "POST")]
        assert (await client.call("OPTIONS", "/v1/completions", None, ask)).status == 403
        same = [("origin", "http://localhost:8000")]
        answer = await client.post("/v1/completions", PROMPT, same)
        assert answer.status == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        read = await client.get("/v1/models", [("origin", "http://evil.example")])
        assert "access-control-allow-origin" not in read.headers

    serving(scenario)


def test_s024_cors_for_the_origins_that_were_listed():
    async def scenario(client: Client) -> None:
        origin = [("origin", "https://app.example")]
        asked = [*origin, ("access-control-request-method", "POST")]
        answer = await client.call("OPTIONS", "/v1/completions", None, asked)
        assert (answer.status, answer.body) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        told = await client.post("/v1/completions", PROMPT, [*origin, *bearer(USER)])
        assert (told.status, told.headers["access-control-allow-origin"]) == (200, "https://app.example")
        assert told.headers["vary"] == "origin"
        unkeyed = await client.post("/v1/completions", PROMPT, origin)
        assert unkeyed.status == 401
        other = await client.post(
            "/v1/completions", PROMPT, [("origin", "https://app.example.evil"), *bearer(USER)]
        )
        assert other.status == 403

    serving(scenario, server={"cors_origins": ["https://app.example"], "api_keys": [USER]})


def test_a_preflight_allows_the_headers_that_are_asked_for():
    """openai-node's are many, and new ones come with its versions."""
    stainless = [f"x-stainless-{name}" for name in ("arch", "lang", "os", "retry-count", "timeout")]
    site = [("origin", "https://app.example"), ("access-control-request-method", "POST")]

    async def scenario(client: Client) -> None:
        async def allowed(asked: str) -> list[str]:
            headers = [*site, ("access-control-request-headers", asked)]
            answer = await client.call("OPTIONS", "/v1/completions", None, headers)
            assert answer.status == 204
            assert "access-control-allow-credentials" not in answer.headers
            return answer.headers["access-control-allow-headers"].split(", ")

        named = ["authorization", "content-type", *stainless]
        assert await allowed(",".join(named)) == named
        assert await allowed("Authorization, X-Stainless-OS") == ["authorization", "x-stainless-os"]
        assert await allowed("x-a, b c, é, x:y, x-d\x00, (, , x-z") == ["x-a", "x-z"]
        assert await allowed("*") == ["*"]
        for many in (",".join(f"x-{i}" for i in range(10_000)), "x" * 30_000):
            told = await allowed(many)
            assert len(told) <= 64
            assert all(len(name) <= 64 for name in told)
        elsewhere = [("origin", "https://evil.example"), *site[1:], ("access-control-request-headers", "x-a")]
        refused = await client.call("OPTIONS", "/v1/completions", None, elsewhere)
        assert refused.status == 403
        assert "access-control-allow-headers" not in refused.headers

    serving(scenario, server={"cors_origins": ["https://app.example"]})


def test_websockets_are_refused():
    async def scenario(client: Client) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await client.app({"type": "websocket", "path": "/v1/completions", "headers": []}, None, send)
        assert sent == [{"type": "websocket.close", "code": 1008}]

    serving(scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "127.0.0.1.example"])
def test_s003_beyond_this_machine_only_with_a_key(host):
    assert not is_loopback(host)
    if host:
        with pytest.raises(ValueError, match=r"^server\.host: "):
            check_exposure(ServerConfig(host=host))
        check_exposure(ServerConfig(host=host, api_keys=("k",)))
        check_exposure(ServerConfig(host=host, insecure=True))
        with pytest.raises(ValueError, match="api_keys"):
            check_exposure(ServerConfig(host=host, admin_keys=("k",)))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_s003_this_machine_needs_none(host):
    assert is_loopback(host)
    check_exposure(ServerConfig(host=host))
    with pytest.raises(ValueError, match="cors_origins"):
        check_exposure(ServerConfig(host=host, cors_origins=("*",)))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"server": {"api_keys": ["sk secret"]}}, "server.api_keys"),
        ({"server": {"api_keys": [7, "sk-secret"]}}, "server.api_keys"),
        ({"server": {"api_key": "sk-secret"}}, "server.api_key"),
        ({"servr": {"api_keys": ["sk-secret"]}}, "servr"),
        ({"server": "sk-secret"}, "server"),
        ({"admin_keys": {"a": "sk-secret"}}, "admin_keys"),
    ],
)
def test_keys_are_in_no_error_of_the_configuration(options, line):
    with pytest.raises(ConfigError) as error:
        load_config("demo", overrides=options)
    assert "secret" not in str(error.value)
    assert line in str(error.value)


def test_keys_are_shown_by_nothing():
    config = load_config(
        "demo", overrides={"server": {"api_keys": ["sk-secret"], "admin_keys": ["sk-secret"]}}
    )
    for text in (
        repr(config),
        str(config),
        repr(config.server),
        config.model_dump_json(),
        str(config.model_dump()),
    ):
        assert "secret" not in text


def test_s031_a_request_id_is_made_harmless():
    async def scenario(client: Client) -> None:
        for value in ("a\r\nx: y", "\x1b[31mred", "x" * 10_000, "ünïcode", "a b"):
            told = (await client.get("/version", [("x-request-id", value)])).headers["x-request-id"]
            assert told.isprintable()
            assert len(told) <= 128
            assert " " not in told
        assert (await client.get("/version", [("x-request-id", "r1")])).headers["x-request-id"] == "r1"
        assert (await client.get("/version")).headers["x-request-id"] != "r1"

    serving(scenario)


@pytest.mark.parametrize("verbose", [False, True])
def test_s031_prompts_are_in_no_log(caplog, verbose):
    caplog.set_level(logging.DEBUG if verbose else logging.INFO, logger="hybridserve")
    secret = "the-secret-word"

    async def scenario(client: Client) -> None:
        headers = [("x-request-id", "a\x1b[31m\r\n" + secret)] if not verbose else []
        await client.post("/v1/completions", {"prompt": secret, "max_tokens": 2, "user": secret}, headers)
        await client.post("/v1/completions", {"prompt": secret, secret: 1})
        await client.post("/v1/completions", {"prompt": secret, "model": secret})
        await client.post("/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]})
        await client.post("/v1/chat/completions", f'{{"messages": "{secret}'.encode())
        assert secret not in caplog.text

    serving(scenario)


def test_s031_a_fault_of_the_server_tells_no_prompt(caplog, monkeypatch):
    async def scenario(client: Client) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("about the-secret-word")

        monkeypatch.setattr("hybridserve.server.completions.CompletionAnswer.whole", fail)
        monkeypatch.setattr("hybridserve.server.completions.CompletionAnswer.pieces", fail)
        for stream in (False, True):
            answer = await client.post("/v1/completions", {**PROMPT, "stream": stream})
            assert "secret" not in answer.body.decode()
            told = answer.events[0] if stream else answer.json
            assert told["error"]["code"] == "internal_error"
        assert "RuntimeError in fail" in caplog.text
        assert "secret" not in caplog.text

    serving(scenario)
