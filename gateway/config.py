"""What an operator may set about a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol import ConfigError

_COUNTS = (
    "max_body_bytes",
    "max_prompts_per_request",
    "max_choices_per_request",
    "max_stop_strings",
    "max_stop_token_ids",
    "max_logit_bias",
)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Limits and keys; the defaults serve a trusted network.

    With `api_keys`, `/v1/...` and `/cluster` ask for one of them as a bearer token. `/health` and
    `/metrics` stay open for probes and scrapers.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_allow_origins: tuple[str, ...] = ()  # empty: no CORS headers at all
    max_body_bytes: int = 8 * 1024 * 1024
    max_prompts_per_request: int = 64  # they all run at once
    max_choices_per_request: int = 128  # prompts times `n`; so do they
    max_stop_strings: int = 16
    max_stop_token_ids: int = 1024
    max_logit_bias: int = 1024  # tokens
    send_timeout_s: float = 60.0  # a client that does not read for so long is gone

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(name, f"must be at least 1, not {getattr(self, name)}")
        if not self.send_timeout_s > 0:
            raise ConfigError("send_timeout_s", f"must be above 0, not {self.send_timeout_s}")
        if "" in self.api_keys:
            raise ConfigError("api_keys", "an empty key would let everybody in")
