"""Who shares with whom what has been computed of prompts: a tenant is a key, or all who need none.

Whether a prompt is found in the cache shows in how fast its answer comes. So tenants have salts of their own,
which nobody can name or guess, and a request can only narrow its tenant's. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NOBODY = ""
"""The tenant of requests without a valid key, where none is needed."""
TENANT_LENGTH = 32
MAX_ASKED = 256
"""Characters of a request's own salt."""


class Tenants:
    """Names tenants by their keys. The names are new with each server, and say nothing of the keys."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def name(self, key_digest: bytes) -> str:
        """Hexadecimal, always `TENANT_LENGTH` characters."""
        return hmac.new(self._secret, key_digest, hashlib.sha256).hexdigest()[:TENANT_LENGTH]


def cache_salt(tenant: str, asked: str | None) -> str | None:
    """The salt of a request, `asked` being what its body says. No two pairs have the same: a tenant's name
    has a fixed length and no colon, and what was asked for always comes after one."""
    if asked is None:
        return tenant or None
    return f"{tenant}:{asked}"
