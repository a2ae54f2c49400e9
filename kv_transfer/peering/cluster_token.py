"""The secret that all nodes of a cluster share. It never travels; what it signs does."""

from __future__ import annotations

import hmac

from protocol import ConfigError

PROOF_BYTES = 32


class ClusterToken:
    """Signs and checks. Raises ConfigError if it is empty. Never shows itself."""

    def __init__(self, secret: str) -> None:
        if not secret:
            raise ConfigError("cluster_token", "is empty")
        self._key = secret.encode()

    def __repr__(self) -> str:
        return "ClusterToken(…)"

    def sign(self, *parts: bytes) -> bytes:
        """Their order and their borders are signed too."""
        signature = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            signature.update(len(part).to_bytes(8, "big") + part)
        return signature.digest()

    def has_signed(self, proof: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(self.sign(*parts), proof)
