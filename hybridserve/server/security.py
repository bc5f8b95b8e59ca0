"""Who may ask for what: the class of every route, keys, and the Host and Origin that a browser names.

Deny by default: a path that no table names needs a user's key. Knows headers; reads no bodies.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
from typing import TYPE_CHECKING

from hybridserve.server.errors import ApiError
from hybridserve.server.playground.files import FILES
from hybridserve.server.tenants import NOBODY, Tenants

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic import SecretStr

    from hybridserve.config.schema import ServerConfig

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CORS_MAX_AGE = "600"
CORS_HEADERS = b"authorization, content-type, x-request-id"
"""Where a browser asks about none by name."""
MAX_ASKED_BYTES = 4096
MAX_ASKED_NAMES = 64
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]{1,64}")


class Access(enum.Enum):
    """Who may call a route. Who may call one of ADMIN may call one of USER."""

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


MODEL = "/v1/models/{id:path}"
"""A name may have slashes: that of the base model often has."""
ROUTES: Mapping[str, Access] = {
    "/health": Access.PUBLIC,
    "/health/live": Access.PUBLIC,
    "/health/ready": Access.PUBLIC,
    "/version": Access.USER,
    "/metrics": Access.USER,
    "/openapi.json": Access.USER,
    "/tokenize": Access.USER,
    "/detokenize": Access.USER,
    "/tokenizer_info": Access.USER,
    "/v1/models": Access.USER,
    MODEL: Access.USER,
    "/v1/completions": Access.USER,
    "/v1/chat/completions": Access.USER,
    "/v1/load_lora_adapter": Access.ADMIN,
    "/v1/unload_lora_adapter": Access.ADMIN,
    "/playground/state": Access.USER,
    **dict.fromkeys(FILES, Access.PUBLIC),
}
"""Every path that is served."""


def route_of(path: str) -> str | None:
    """The one of ROUTES that serves a path."""
    if path in ROUTES:
        return path
    return MODEL if path.startswith("/v1/models/") else None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen at."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(config: ServerConfig) -> None:
    """ValueError for a server that anybody could use without meaning to let them."""
    if not is_loopback(config.host) and not config.api_keys and not config.insecure:
        raise ValueError(
            f"server.host: {config.host!r} lets other machines in and there is no key: set server.api_keys "
            "(--api-key), listen at 127.0.0.1, or say --insecure"
        )
    if "*" in config.cors_origins and not config.api_keys:
        raise ValueError(
            "server.cors_origins: '*' lets every page of the web use the server; set server.api_keys"
        )


class Keys:
    """Compares in a time that does not depend on how much of a key was right, nor on which one was."""

    def __init__(self, keys: Iterable[SecretStr]) -> None:
        self._digests = [digest_of(key.get_secret_value()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def have(self, key: str) -> bool:
        digest = digest_of(key)
        found = False
        for each in self._digests:  # all of them, always
            found |= hmac.compare_digest(digest, each)
        return found


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


class Policy:
    """Decides on a request by its method, path and headers: raises ApiError for what may not go on."""

    def __init__(self, config: ServerConfig) -> None:
        self._users = Keys(config.api_keys)
        self._admins = Keys(config.admin_keys)
        self._tenants = Tenants()
        self._is_local = is_loopback(config.host)
        self._origins = frozenset(config.cors_origins)
        self._hosts = frozenset(config.allowed_hosts)
        if not self._hosts and self._is_local:
            own = f"[{config.host}]" if ":" in config.host else config.host.lower()
            self._hosts = frozenset({"localhost", "127.0.0.1", "[::1]", own})

    def check(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> str:
        """Returns the tenant, whose prompts share what has been computed."""
        access = ROUTES.get(route_of(path) or path, Access.USER)
        if access is not Access.PUBLIC:  # probes name a machine by its address
            self._check_host(headers)
        if method not in SAFE_METHODS:
            self._check_origin(headers)
        return self._check_key(access, headers)

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        if not self._hosts:
            return
        name = headers.get(b"host", b"").decode("latin-1").lower()
        end = name.rfind(":")
        if end > name.rfind("]"):
            name = name[:end]
        if name not in self._hosts:
            raise ApiError(403, "the Host header names none of server.allowed_hosts", code="host_not_allowed")

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """A page may change something only where it came from here, or from server.cors_origins."""
        origin = headers.get(b"origin")
        if origin is None or self.allowed_origin(headers) is not None:
            return
        host = headers.get(b"host", b"").lower()
        if origin.lower() not in (b"http://" + host, b"https://" + host):
            raise ApiError(
                403, "the Origin header names none of server.cors_origins", code="origin_not_allowed"
            )

    def _check_key(self, access: Access, headers: Mapping[bytes, bytes]) -> str:
        if access is Access.PUBLIC:
            return NOBODY
        scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        is_user, is_admin = self._users.have(key), self._admins.have(key)
        if access is Access.ADMIN:
            self._check_admin(is_user, is_admin)
        elif self._users and not (is_user or is_admin):
            raise _unauthorized()
        return self._tenants.name(digest_of(key)) if is_user or is_admin else NOBODY

    def _check_admin(self, is_user: bool, is_admin: bool) -> None:
        if is_admin:
            return
        if not self._admins and not self._users and self._is_local:
            return
        if (self._admins or self._users) and not is_user:
            raise _unauthorized()
        raise ApiError(
            403,
            "this needs one of server.admin_keys" + ("" if self._admins else ", and there is none"),
            code="admin_key_needed",
        )

    # ---- pages of other origins

    def allowed_origin(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The Origin, where `server.cors_origins` has it."""
        origin = headers.get(b"origin")
        if origin is None or not self._origins:
            return None
        return origin if "*" in self._origins or origin.decode("latin-1").lower() in self._origins else None

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]] | None:
        """The headers that answer a browser which asks first; None for any other request."""
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if self.allowed_origin(headers) is None:
            raise ApiError(
                403, "the Origin header names none of server.cors_origins", code="origin_not_allowed"
            )
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", _names(headers.get(b"access-control-request-headers", b""))),
            (b"access-control-max-age", CORS_MAX_AGE.encode()),
        ]


def _names(asked: bytes) -> bytes:
    """The headers that a page may send: those that its browser asks about, if they can be names of
    headers, and not very many. Clients have headers of their own (x-stainless-...); none opens anything."""
    names = [name.strip().lower() for name in asked[:MAX_ASKED_BYTES].split(b",")]
    valid = [name for name in names[:MAX_ASKED_NAMES] if _HEADER_NAME.fullmatch(name)]
    return b", ".join(valid) or CORS_HEADERS


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "a valid key is needed: Authorization: Bearer KEY",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )
