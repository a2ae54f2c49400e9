"""What the fields of sampling become, and the answers that only some of them make."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway import GatewayConfig
from gateway.token_spelling import TokenSpelling
from protocol import SamplingParams
from tests.gateway.byte_tokenizer import END, byte_tokenizer, ids
from tests.gateway.gateway_under_test import Gateway, chat, completion
from tests.gateway.scripted_backend import Script, ScriptedBackend, scripted_logprobs
from tests.gateway.test_answers import CHAT, COMPLETIONS, gateway_saying, post, stream

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


def body_for(path: str, **fields: object) -> dict[str, Any]:
    return completion("hi", **fields) if path == COMPLETIONS else chat("hi", **fields)


async def sampling_of(directory: Path, path: str, **fields: object) -> SamplingParams:
    gateway = gateway_saying("x", directory)
    await post(gateway, path, body_for(path, **fields))
    return gateway.backend.requests[0].sampling


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "become"),
    [
        ("temperature", 0.3, 0.3),
        ("top_p", 0.3, 0.3),
        ("top_k", 7, 7),
        ("min_p", 0.25, 0.25),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("frequency_penalty", 1.5, 1.5),
        ("repetition_penalty", 1.3, 1.3),
        ("logit_bias", {"5": 1, "007": -100, "258": 2.5}, ((5, 1.0), (7, -100.0), (258, 2.5))),
        ("min_tokens", 4, 4),
        ("seed", 12, 12),
        ("stop_token_ids", [4, 5], (4, 5)),
    ],
)
async def test_each_field_reaches_the_engine(
    tmp_path: Path, path: str, name: str, value: object, become: object
) -> None:
    plain = await sampling_of(tmp_path, path, max_tokens=5, seed=0)
    sampling = await sampling_of(tmp_path, path, **{"max_tokens": 5, "seed": 0, name: value})
    assert sampling == msgspec.structs.replace(plain, **{name: become})
    assert sampling != plain
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling


@pytest.mark.parametrize(
    ("path", "fields", "number"),
    [
        (COMPLETIONS, {"logprobs": 0}, 0),
        (COMPLETIONS, {"logprobs": 20}, 20),
        (COMPLETIONS, {"logprobs": False}, None),
        (COMPLETIONS, {}, None),
        (CHAT, {"logprobs": True}, 0),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, 20),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, None),
        (CHAT, {}, None),
    ],
)
async def test_how_many_logprobs_are_asked_for(
    tmp_path: Path, path: str, fields: dict[str, object], number: int | None
) -> None:
    assert (await sampling_of(tmp_path, path, **fields)).logprobs == number


@pytest.mark.parametrize("field", ["top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0])
def test_no_process_takes_such_numbers_from_another(field: str, value: float) -> None:
    wire = msgspec.msgpack.encode({field: value})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=SamplingParams)


class TestChoices:
    @BOTH
    async def test_each_prompt_has_n_of_them(self, tmp_path: Path, path: str) -> None:
        gateway = gateway_saying("abc", tmp_path, num_cached_tokens=1)
        body = await post(gateway, path, body_for(path, n=3, max_tokens=2, seed=40))
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        first, *rest = gateway.backend.requests
        assert [r.request_id for r in (first, *rest)] == [f"{body['id']}-{i}" for i in range(3)]
        assert [r.sampling.seed for r in (first, *rest)] == [40, 41, 42]
        assert first.follows is None
        assert [r.follows for r in rest] == [first.request_id] * 2
        assert {r.prompt_token_ids for r in rest} == {first.prompt_token_ids}
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(first.prompt_token_ids)
        assert usage["completion_tokens"] == 6
        assert usage["total_tokens"] == usage["prompt_tokens"] + 6
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}

    async def test_those_of_a_prompt_are_beside_each_other(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abc", tmp_path)
        body = await post(
            gateway, COMPLETIONS, completion(["a", "bcd"], n=2, return_token_ids=True)
        )
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        prompts = [tuple(choice["prompt_token_ids"]) for choice in body["choices"]]
        assert prompts == [ids("a"), ids("a"), ids("bcd"), ids("bcd")]
        requests = gateway.backend.requests
        assert [r.follows for r in requests] == [
            *(None, requests[0].request_id),
            *(None, requests[2].request_id),
        ]
        assert body["usage"]["prompt_tokens"] == 4

    async def test_without_a_seed_they_differ(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion("a", n=5))
        seeds = {request.sampling.seed for request in gateway.backend.requests}
        assert len(seeds) == 5
        assert all(0 <= seed < 2**63 for seed in seeds)

    async def test_the_largest_seed_is_followed_by_the_smallest(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion("a", n=2, seed=-1))
        assert [r.sampling.seed for r in gateway.backend.requests] == [2**63 - 1, 0]

    async def test_in_a_chat_stream_each_begins_with_a_role(self, tmp_path: Path) -> None:
        gateway = gateway_saying("ab", tmp_path)
        *chunks, _ = await stream(gateway, CHAT, chat("hi", n=3, max_tokens=2))
        for index in range(3):
            deltas = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert [d["delta"].get("role") for d in deltas] == ["assistant", None]
            assert [d["delta"]["content"] for d in deltas] == ["a", "b"]
            assert deltas[-1]["finish_reason"] == "length"

    async def test_the_limit_is_the_operator_s(self, tmp_path: Path) -> None:
        config = GatewayConfig(max_choices_per_request=3)
        gateway = Gateway(ScriptedBackend(), tmp_path, config)
        async with gateway.client() as client:
            good = await client.post(COMPLETIONS, json=completion("a", n=3))
            bad = await client.post(COMPLETIONS, json=completion(["a", "b"], n=2))
        assert good.status_code == 200
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "n"


class TestCompletionLogprobs:
    async def test_the_lists(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abc", tmp_path)
        body = await post(gateway, COMPLETIONS, completion(logprobs=2, max_tokens=3))
        assert body["choices"][0]["logprobs"] == {
            "text_offset": [0, 1, 2],
            "token_logprobs": [-0.5, -0.5, -0.5],
            "tokens": ["a", "b", "c"],
            "top_logprobs": [
                {"a": -0.5, "b": -0.75},
                {"b": -0.5, "c": -0.75},
                {"c": -0.5, "d": -0.75},
            ],
        }

    async def test_the_chosen_token_is_always_there(self, tmp_path: Path) -> None:
        gateway = gateway_saying("ab", tmp_path)
        body = await post(gateway, COMPLETIONS, completion(logprobs=0, max_tokens=2))
        assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]

    async def test_offsets_are_those_of_characters_in_the_text(self, tmp_path: Path) -> None:
        """A character of two tokens has one place, and the end of text is behind all."""
        gateway = gateway_saying("é🙂x", tmp_path, then_end=True, chunk_tokens=3)
        body = await post(gateway, COMPLETIONS, completion(logprobs=1, max_tokens=12))
        choice = body["choices"][0]
        assert choice["text"] == "é🙂x"
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 3]
        assert choice["logprobs"]["tokens"] == ["\ufffd"] * 6 + ["x", "<|im_end|>"]

    @pytest.mark.parametrize("chunk_tokens", [1, 2, 5])
    async def test_a_stream_has_the_same_in_pieces(self, tmp_path: Path, chunk_tokens: int) -> None:
        gateway = gateway_saying("añ🙂b", tmp_path, chunk_tokens=chunk_tokens)
        fields = {"logprobs": 3, "max_tokens": 9, "stop": ["nothing"]}
        whole = (await post(gateway, COMPLETIONS, completion(**fields)))["choices"][0]["logprobs"]
        *chunks, _ = await stream(gateway, COMPLETIONS, completion(**fields))
        pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for name in whole:
            assert [item for piece in pieces for item in piece[name]] == whole[name]
        assert len(whole["tokens"]) == 9

    async def test_tokens_behind_a_stop_string_have_none(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abcdef", tmp_path, chunk_tokens=6)
        body = await post(gateway, COMPLETIONS, completion(logprobs=1, stop="cd"))
        choice = body["choices"][0]
        assert choice["text"] == "ab"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
        assert body["usage"]["completion_tokens"] == 4

    async def test_ids_instead_of_texts(self, tmp_path: Path) -> None:
        """Texts that several tokens share would be one key."""
        gateway = gateway_saying("é", tmp_path)
        fields = {"logprobs": 2, "max_tokens": 2}
        body = await post(gateway, COMPLETIONS, completion(**fields))
        assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}] * 2
        fields["return_tokens_as_token_ids"] = True
        body = await post(gateway, COMPLETIONS, completion(**fields))
        logprobs = body["choices"][0]["logprobs"]
        first, second = ids("é")
        assert logprobs["tokens"] == [f"token_id:{first}", f"token_id:{second}"]
        assert logprobs["top_logprobs"][0] == {
            f"token_id:{first}": -0.5,
            f"token_id:{first + 1}": -0.75,
        }

    async def test_nobody_asked(self, tmp_path: Path) -> None:
        gateway = gateway_saying("ab", tmp_path)
        body = await post(gateway, COMPLETIONS, completion(max_tokens=2))
        assert body["choices"][0]["logprobs"] is None


class TestChatLogprobs:
    async def test_each_token_with_its_bytes(self, tmp_path: Path) -> None:
        gateway = gateway_saying("é", tmp_path, then_end=True)
        body = await post(gateway, CHAT, chat(logprobs=True, top_logprobs=2))
        first, second = ids("é")
        assert body["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "\ufffd",
                    "logprob": -0.5,
                    "bytes": [first],
                    "top_logprobs": [
                        {"token": "\ufffd", "logprob": -0.5, "bytes": [first]},
                        {"token": "\ufffd", "logprob": -0.75, "bytes": [first + 1]},
                    ],
                },
                {
                    "token": "\ufffd",
                    "logprob": -0.5,
                    "bytes": [second],
                    "top_logprobs": [
                        {"token": "\ufffd", "logprob": -0.5, "bytes": [second]},
                        {"token": "\ufffd", "logprob": -0.75, "bytes": [second + 1]},
                    ],
                },
                {
                    "token": "<|im_end|>",
                    "logprob": -0.5,
                    "bytes": list(b"<|im_end|>"),
                    "top_logprobs": [
                        {"token": "<|im_end|>", "logprob": -0.5, "bytes": list(b"<|im_end|>")},
                        {"token": "<|bos|>", "logprob": -0.75, "bytes": list(b"<|bos|>")},
                    ],
                },
            ],
            "refusal": None,
        }

    async def test_no_likeliest_ones_unless_asked_for(self, tmp_path: Path) -> None:
        body = await post(gateway_saying("a", tmp_path), CHAT, chat(logprobs=True, max_tokens=1))
        assert body["choices"][0]["logprobs"]["content"] == [
            {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
        ]

    async def test_a_stream_has_the_same_in_pieces(self, tmp_path: Path) -> None:
        gateway = gateway_saying("añb", tmp_path, chunk_tokens=2)
        fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 7, "n": 2}
        whole = (await post(gateway, CHAT, chat(**fields)))["choices"]
        *chunks, _ = await stream(gateway, CHAT, chat(**fields))
        for choice in whole:
            pieces = [
                c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]
            ]
            content = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
            assert content == choice["logprobs"]["content"]

    async def test_nobody_asked(self, tmp_path: Path) -> None:
        gateway = gateway_saying("ab", tmp_path)
        *chunks, _ = await stream(gateway, CHAT, chat(max_tokens=2))
        assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [None, None]

    async def test_a_token_that_the_vocabulary_does_not_spell(self, tmp_path: Path) -> None:
        """Models have more tokens than their tokenizers, for the sake of round numbers."""
        gateway = gateway_saying("x", tmp_path, then_end=True)
        fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 2}
        body = await post(gateway, CHAT, chat(**fields))
        *_, unknown = body["choices"][0]["logprobs"]["content"][1]["top_logprobs"]
        assert scripted_logprobs(END, 3).top_token_ids[-1] == END + 2
        assert unknown == {"token": "", "logprob": -1.0, "bytes": None}


class TestMinTokens:
    """Stop tokens are the engine's part of it; stop strings are the gateway's."""

    @pytest.mark.parametrize("chunk_tokens", [1, 4, 50])
    @pytest.mark.parametrize(
        ("min_tokens", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab")]
    )
    async def test_a_stop_string_ends_nothing_before(
        self, tmp_path: Path, min_tokens: int, text: str, chunk_tokens: int
    ) -> None:
        gateway = gateway_saying("ab", tmp_path, chunk_tokens=chunk_tokens)
        fields = {"stop": "ab", "min_tokens": min_tokens, "max_tokens": 50}
        body = await post(gateway, COMPLETIONS, completion("p", **fields))
        choice = body["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (text, "ab")
        assert body["usage"]["completion_tokens"] == len(text) + 2

    async def test_as_many_as_may_follow(self, tmp_path: Path) -> None:
        gateway = gateway_saying("ab", tmp_path)
        fields = {"stop": "b", "min_tokens": 6, "max_tokens": 6}
        body = await post(gateway, COMPLETIONS, completion("p", **fields))
        assert body["choices"][0]["text"] == "ababab"
        assert body["choices"][0]["finish_reason"] == "length"


def test_spelling(tmp_path: Path) -> None:
    spelling = TokenSpelling(byte_tokenizer(tmp_path))
    assert [spelling.text(token) for token in (*ids(" \n"), END)] == [" ", "\n", "<|im_end|>"]
    assert [spelling.bytes(token) for token in (ids("é")[0], 999)] == [b"\xc3", None]


async def test_choices_of_one_call_are_made_at_the_same_time(tmp_path: Path) -> None:
    gateway = Gateway(ScriptedBackend(Script(ids("ab"), delay_s=0.05)), tmp_path)
    async with asyncio.timeout(5):
        began = asyncio.get_running_loop().time()
        await post(gateway, COMPLETIONS, completion("a", n=20, max_tokens=4))
    assert asyncio.get_running_loop().time() - began < 20 * 4 * 0.05 / 2
