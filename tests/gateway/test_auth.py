"""With API keys, nobody gets in without one, and no key is ever shown."""

import logging
from pathlib import Path

import httpx
import pytest

from gateway import GatewayConfig
from protocol import ConfigError
from tests.gateway.gateway_under_test import Gateway, completion
from tests.gateway.scripted_backend import ScriptedBackend

KEYS = ("sk-first-key", "sk-zweiter-schlüssel")


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(ScriptedBackend(), tmp_path, GatewayConfig(api_keys=KEYS))


async def ask(gateway: Gateway, authorization: bytes | None) -> httpx.Response:
    headers = {} if authorization is None else {b"Authorization": authorization}
    async with gateway.client() as client:
        return await client.post("/v1/completions", json=completion(), headers=headers)


@pytest.mark.parametrize("scheme", [b"Bearer ", b"bearer ", b"BEARER  "])
async def test_a_right_key(gateway: Gateway, scheme: bytes) -> None:
    assert (await ask(gateway, scheme + b"sk-first-key")).status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-wrong",
        b"Bearer sk-first-ke",
        b"Bearer sk-first-key2",
        b"Bearer sk-first-key sk-first-key",
        b"Basic sk-first-key",
        b"sk-first-key",
        b"Bearer \xff\xfe",
    ],
)
async def test_a_wrong_key(gateway: Gateway, authorization: bytes | None) -> None:
    response = await ask(gateway, authorization)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert gateway.backend.streams == []


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 401), ("/v1/models/x", 401), ("/cluster", 401), ("/metrics", 200)],
)
async def test_what_needs_a_key(gateway: Gateway, path: str, status: int) -> None:
    async with gateway.client() as client:
        assert (await client.get(path)).status_code == status


async def test_probes_need_none(gateway: Gateway) -> None:
    async with gateway.client() as client:
        assert (await client.get("/health")).status_code == 503  # no nodes, but it answers


async def test_keys_are_nowhere_to_be_seen(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    response = await ask(gateway, b"Bearer sk-first-key-mistyped")
    shown = caplog.text + response.text + repr(gateway.config) + str(vars(gateway.app.state))
    assert not any(key in shown for key in KEYS)


def test_an_empty_key_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        GatewayConfig(api_keys=("",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_body_bytes": 0},
        {"max_prompts_per_request": 0},
        {"max_choices_per_request": 0},
        {"max_stop_strings": -1},
        {"max_stop_token_ids": 0},
        {"max_logit_bias": 0},
        {"send_timeout_s": 0.0},
        {"send_timeout_s": float("nan")},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        GatewayConfig(**wrong)  # type: ignore[arg-type]
