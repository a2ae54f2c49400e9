"""Who may use the API."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request

from gateway.errors import Unauthorized


class ApiKeys:
    """Lets requests pass that bear one of the keys; without keys, all.

    Only digests are kept, and each is compared: the time taken tells neither a key's length, nor
    how much of a guess is right, nor which key it was.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key) for key in keys]

    async def check(self, request: Request) -> None:
        """Raises `Unauthorized`."""
        if not self._digests:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        given = _digest(key.strip())
        if not sum(hmac.compare_digest(given, known) for known in self._digests):
            raise Unauthorized("the API key is not one of this server's")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
