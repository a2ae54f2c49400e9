"""What comes back for what is sent: texts, ids, usage, and the very bytes of a stream."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import GatewayConfig
from protocol import GenerationRequest
from tests.gateway.byte_tokenizer import END, START, ids
from tests.gateway.gateway_under_test import MAX_MODEL_LEN, Gateway, chat, completion, events
from tests.gateway.scripted_backend import Script, ScriptedBackend

Body = dict[str, Any]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def gateway_saying(text: str, directory: Path, *, then_end: bool = False, **script: Any) -> Gateway:
    answer = ids(text) + ((END,) if then_end else ())
    return Gateway(ScriptedBackend(Script(answer=answer, **script)), directory)


async def post(gateway: Gateway, path: str, body: Body) -> Body:
    async with gateway.client() as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    gateway.backend.assert_nothing_left()
    return response.json()


async def stream(gateway: Gateway, path: str, body: Body) -> list[Any]:
    async with gateway.client() as client:
        response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    gateway.backend.assert_nothing_left()
    return events(response.text)


async def test_a_completion(tmp_path: Path) -> None:
    gateway = gateway_saying("hello", tmp_path, num_cached_tokens=2)
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json=completion("abc", max_tokens=7))
    body = response.json()
    assert body.pop("created") == pytest.approx(gateway.backend.requests[0].arrival_time, abs=1)
    assert body == {
        "id": response.headers["x-request-id"],
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "text": "hellohe",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 7,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert body["id"].startswith("cmpl-")
    assert [r.request_id for r in gateway.backend.requests] == [f"{body['id']}-0"]


async def test_a_chat(tmp_path: Path) -> None:
    gateway = gateway_saying("hello", tmp_path, then_end=True)
    body = await post(gateway, CHAT, chat("abc"))
    prompt = (START, *ids("user\nabc"), END, *ids("\n"), START, *ids("assistant\n"))
    assert gateway.backend.requests[0].prompt_token_ids == prompt
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == len("hello") + 1


async def test_the_bytes_of_a_completion_stream(tmp_path: Path) -> None:
    gateway = gateway_saying("añb", tmp_path, chunk_tokens=2)
    body = completion("x", max_tokens=4, stream=True, stream_options={"include_usage": True})
    async with gateway.client() as client:
        response = await client.post(COMPLETIONS, json=body)
    created = int(gateway.backend.requests[0].arrival_time)
    head = (
        f'data: {{"id":"{response.headers["x-request-id"]}","object":"text_completion",'
        f'"created":{created},"model":"scripted","choices":['
    )
    choice = '{"index":0,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}'
    usage = (
        '{"prompt_tokens":1,"completion_tokens":4,"total_tokens":5,'
        '"prompt_tokens_details":{"cached_tokens":0}}'
    )
    assert response.content.decode() == (
        head + choice % ("a", "null") + '],"usage":null}\n\n'
        + head + choice % ("ñb", '"length"') + '],"usage":null}\n\n'
        + head + '],"usage":' + usage + "}\n\n"
        + "data: [DONE]\n\n"
    )  # fmt: skip
    assert response.headers["cache-control"] == "no-cache"


async def test_a_chat_stream(tmp_path: Path) -> None:
    gateway = gateway_saying("abc", tmp_path)
    *chunks, done = await stream(gateway, CHAT, chat(max_tokens=3))
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {"content": "c"},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_in_a_stream_comes_last_and_is_null_before(tmp_path: Path) -> None:
    gateway = gateway_saying("abc", tmp_path, num_cached_tokens=1)
    asked = chat(max_tokens=3, stream_options={"include_usage": True})
    *chunks, last, done = await stream(gateway, CHAT, asked)
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert done == "[DONE]"


async def test_one_event_for_each_chunk_of_tokens(tmp_path: Path) -> None:
    gateway = gateway_saying("abcdefgh", tmp_path, chunk_tokens=4)
    *chunks, _ = await stream(gateway, COMPLETIONS, completion(max_tokens=8))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["abcd", "efgh"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path, path: str) -> None:
    gateway = gateway_saying("grüße 🙂 END rest", tmp_path, chunk_tokens=3)
    body = completion(max_tokens=30) if path == COMPLETIONS else chat(max_tokens=30)
    body |= {"stop": ["END"], "seed": 1, "return_token_ids": True}
    whole = (await post(gateway, path, body))["choices"][0]
    *chunks, _ = await stream(gateway, path, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(c["text"] if path == COMPLETIONS else c["delta"]["content"] for c in choices)
    assert text == "grüße 🙂 "
    assert text == (whole["text"] if path == COMPLETIONS else whole["message"]["content"])
    assert [token for c in choices for token in c["token_ids"]] == whole["token_ids"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == whole["stop_reason"] == "END"


class TestStops:
    @pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 100])
    @pytest.mark.parametrize(
        ("stop", "text"),
        [("lo w", "hel"), ("h", ""), (["xyz", " w"], "hello"), (["zzz"], "hello worl")],
    )
    async def test_stop_strings(
        self, tmp_path: Path, chunk_tokens: int, stop: object, text: str
    ) -> None:
        gateway = gateway_saying("hello world", tmp_path, chunk_tokens=chunk_tokens)
        body = await post(gateway, COMPLETIONS, completion(max_tokens=10, stop=stop))
        found = text != "hello worl"
        assert body["choices"][0]["text"] == text
        assert body["choices"][0]["finish_reason"] == ("stop" if found else "length")
        if found:
            assert gateway.backend.streams[0].closed.is_set()
            # Counted up to the token that completed the stop string, however tokens were chunked.
            stopped = body["choices"][0]["stop_reason"]
            assert body["usage"]["completion_tokens"] == len(text) + len(stopped)

    async def test_nothing_of_a_stop_string_is_streamed(self, tmp_path: Path) -> None:
        gateway = gateway_saying("one\n\ntwo", tmp_path)
        *chunks, _ = await stream(gateway, COMPLETIONS, completion(max_tokens=9, stop="\n\n"))
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert texts == ["o", "n", "e", "", ""]

    async def test_a_stop_token_ends_and_is_named(self, tmp_path: Path) -> None:
        gateway = gateway_saying("hello", tmp_path)
        body = await post(gateway, COMPLETIONS, completion(stop_token_ids=[ord("l")]))
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("he", "stop")
        assert choice["stop_reason"] == ord("l")
        assert body["usage"]["completion_tokens"] == 3

    async def test_end_of_text_may_be_ignored(self, tmp_path: Path) -> None:
        gateway = gateway_saying("hi", tmp_path, then_end=True)
        body = await post(gateway, COMPLETIONS, completion(max_tokens=5, ignore_eos=True))
        assert body["choices"][0]["text"] == "hihi"  # the end-of-text token itself is no text
        assert body["usage"]["completion_tokens"] == 5
        assert gateway.backend.requests[0].sampling.eos_token_ids == ()


class TestPrompts:
    async def test_token_ids_go_through_as_they_are(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion([5, 258, 0]))
        assert gateway.backend.requests[0].prompt_token_ids == (5, 258, 0)

    @pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], [99]], ["ab", [99]]])
    @pytest.mark.parametrize("streams", [False, True])
    async def test_each_prompt_of_a_list_is_a_choice(
        self, tmp_path: Path, prompts: object, streams: bool
    ) -> None:
        def script(request: GenerationRequest) -> Script:
            slow = len(request.prompt_token_ids) == 2
            return Script(answer=request.prompt_token_ids, delay_s=0.002 if slow else 0)

        gateway = Gateway(ScriptedBackend(script), tmp_path)
        asked = completion(prompts, max_tokens=4, stream_options={"include_usage": True})
        if streams:
            *chunks, usage, _ = await stream(gateway, COMPLETIONS, asked)
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            said = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(2)]
            assert [c["finish_reason"] for c in choices].count("length") == 2
            assert usage["usage"]["total_tokens"] == 3 + 8
        else:
            del asked["stream_options"]
            body = await post(gateway, COMPLETIONS, asked)
            said = [choice["text"] for choice in body["choices"]]
            assert [choice["index"] for choice in body["choices"]] == [0, 1]
            assert body["usage"]["total_tokens"] == 3 + 8
        assert said == ["abab", "cccc"]
        ids_seen = [request.request_id for request in gateway.backend.requests]
        assert ids_seen == [f"{ids_seen[0][:-2]}-0", f"{ids_seen[0][:-2]}-1"]

    async def test_content_may_come_in_text_parts(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
        await post(gateway, CHAT, chat(parts))
        await post(gateway, CHAT, chat("ab\ncd"))
        first, second = gateway.backend.requests
        assert first.prompt_token_ids == second.prompt_token_ids

    async def test_a_developer_speaks_as_the_system(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path, then_end=True)
        messages = [{"role": "developer", "content": "be brief"}]
        await post(gateway, CHAT, {"model": "scripted", "messages": messages})
        prompt = bytes(t for t in gateway.backend.requests[0].prompt_token_ids if t < 256)
        assert prompt.startswith(b"system\nbe brief")

    async def test_an_answer_can_be_sent_back_as_it_came(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        answer = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None}
        messages = [{"role": "user", "content": "a"}, {**answer, "audio": None, "annotations": []}]
        await post(gateway, CHAT, {"model": "scripted", "messages": messages, "max_tokens": 1})

    async def test_a_large_body_is_parsed_as_a_small_one_is(self, tmp_path: Path) -> None:
        backend = ScriptedBackend(Script(answer=ids("y")))
        gateway = Gateway(backend, tmp_path, max_model_len=100_000)
        body = await post(gateway, COMPLETIONS, completion("x" * 50_000))
        assert body["usage"]["prompt_tokens"] == 50_000


class TestReturnedTokenIds:
    async def test_whole(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abc", tmp_path, then_end=True)
        body = await post(gateway, COMPLETIONS, completion("hi", return_token_ids=True))
        choice = body["choices"][0]
        assert choice["token_ids"] == [*ids("abc"), END]
        assert choice["prompt_token_ids"] == [*ids("hi")]

    async def test_streamed_with_the_prompt_in_each_first_chunk(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abc", tmp_path)
        asked = completion(["h", "i"], max_tokens=2, return_token_ids=True)
        *chunks, _ = await stream(gateway, COMPLETIONS, asked)
        choices = [chunk["choices"][0] for chunk in chunks]
        for index, prompt in enumerate("hi"):
            own = [choice for choice in choices if choice["index"] == index]
            assert [c["token_ids"] for c in own] == [[97], [98]]
            assert [c.get("prompt_token_ids") for c in own] == [[*ids(prompt)], None]

    async def test_a_chat_has_the_prompt_beside_its_choices(self, tmp_path: Path) -> None:
        gateway = gateway_saying("abc", tmp_path)
        asked = chat(max_tokens=2, return_token_ids=True)
        body = await post(gateway, CHAT, asked)
        assert body["choices"][0]["token_ids"] == [97, 98]
        assert body["prompt_token_ids"][0] == START
        first, second, _ = await stream(gateway, CHAT, asked)
        assert first["prompt_token_ids"] == body["prompt_token_ids"]
        assert "prompt_token_ids" not in second


class TestParameters:
    async def test_defaults(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion("ab"))
        await post(gateway, CHAT, chat("ab"))
        plain, chatted = (request.sampling for request in gateway.backend.requests)
        assert (plain.temperature, plain.top_p, plain.top_k) == (1.0, 1.0, 0)
        assert plain.max_tokens == 16
        prompt = gateway.backend.requests[1].prompt_token_ids
        assert chatted.max_tokens == MAX_MODEL_LEN - len(prompt)
        assert plain.eos_token_ids == (END,)

    async def test_a_default_is_never_more_than_fits(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion([1] * (MAX_MODEL_LEN - 3)))
        assert gateway.backend.requests[0].sampling.max_tokens == 3

    async def test_what_is_given_arrives(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        given: Body = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 3}
        given |= {"stop_token_ids": [4], "priority": -2, "cache_salt": "tenant"}
        await post(gateway, COMPLETIONS, completion(**given, prompt_cache_key="session"))
        (request,) = gateway.backend.requests
        for name in ("temperature", "top_p", "top_k", "seed", "max_tokens"):
            assert getattr(request.sampling, name) == given[name]
        assert request.sampling.stop_token_ids == (4,)
        assert (request.priority, request.cache_salt) == (-2, "tenant")
        assert request.session_id == "session"

    async def test_the_newer_name_of_max_tokens(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, CHAT, chat(max_completion_tokens=3))
        await post(gateway, CHAT, chat(max_completion_tokens=4, max_tokens=4))
        limits = [request.sampling.max_tokens for request in gateway.backend.requests]
        assert limits == [3, 4]

    async def test_vllms_minus_one_means_all(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion(top_k=-1))
        assert gateway.backend.requests[0].sampling.top_k == 0

    async def test_without_a_seed_each_choice_gets_one_of_its_own(self, tmp_path: Path) -> None:
        gateway = gateway_saying("x", tmp_path)
        await post(gateway, COMPLETIONS, completion(["a", "b"]))
        await post(gateway, COMPLETIONS, completion(["a", "b"], seed=-1))
        seeds = [request.sampling.seed for request in gateway.backend.requests]
        assert seeds[0] != seeds[1]
        assert seeds[2] == seeds[3]
        assert all(0 <= seed < 2**63 for seed in seeds)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    async def test_null_is_not_given(self, tmp_path: Path, path: str) -> None:
        names = "max_tokens temperature top_p top_k seed stop stream stream_options n user tools"
        names += " logprobs logit_bias best_of echo response_format metadata"
        if path == COMPLETIONS:
            names = names.replace(" tools", "")
        body = completion() if path == COMPLETIONS else chat()
        await post(gateway_saying("x", tmp_path), path, {**body, **dict.fromkeys(names.split())})

    async def test_what_asks_for_nothing_is_accepted(self, tmp_path: Path) -> None:
        harmless = {
            "user": "somebody",
            "metadata": {"a": "b"},
            "store": False,
            "n": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "logprobs": False,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "service_tier": "auto",
            "min_tokens": 0,
        }
        await post(gateway_saying("x", tmp_path), CHAT, chat(**harmless))
        await post(
            gateway_saying("x", tmp_path), COMPLETIONS, completion(best_of=1, echo=False, suffix="")
        )


async def test_the_models(tmp_path: Path) -> None:
    gateway = gateway_saying("x", tmp_path)
    async with gateway.client() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/alias/of-it")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["scripted", "alias/of-it"]
    assert one == listed["data"][1]
    assert one["max_model_len"] == MAX_MODEL_LEN
    body = await post(gateway, COMPLETIONS, {**completion(), "model": "alias/of-it"})
    assert body["model"] == "alias/of-it"


async def test_every_response_has_an_id_of_its_own(tmp_path: Path) -> None:
    gateway = gateway_saying("x", tmp_path)
    async with gateway.client() as client:
        responses = [await client.get(p) for p in ("/health", "/health", "/nowhere", "/metrics")]
    seen = [response.headers["x-request-id"] for response in responses]
    assert len(set(seen)) == 4
    assert all(request_id.startswith("req-") for request_id in seen)


async def test_cors_is_off_unless_asked_for(tmp_path: Path) -> None:
    origin = {"Origin": "http://elsewhere"}
    plain = gateway_saying("x", tmp_path)
    async with plain.client() as client:
        response = await client.get("/v1/models", headers=origin)
    assert not any(name.startswith("access-control") for name in response.headers)
    config = GatewayConfig(cors_allow_origins=("http://elsewhere",))
    async with Gateway(ScriptedBackend(), tmp_path, config).client() as client:
        response = await client.get("/v1/models", headers=origin)
    assert response.headers["access-control-allow-origin"] == "http://elsewhere"


async def test_requests_are_counted_by_outcome_and_tokens_by_kind(tmp_path: Path) -> None:
    gateway = gateway_saying("abc", tmp_path, num_cached_tokens=1)
    await post(gateway, COMPLETIONS, completion("four", max_tokens=3))
    await stream(gateway, COMPLETIONS, completion("four", max_tokens=3))
    async with gateway.client() as client:
        await client.post(CHAT, content=json.dumps({}))
    assert gateway.metric("kvrelay_requests_total", endpoint="completions", outcome="ok") == 2
    refused = gateway.metric("kvrelay_requests_total", endpoint="chat", outcome="invalid_request")
    assert refused == 1
    assert gateway.metric("kvrelay_prompt_tokens_total") == 8
    assert gateway.metric("kvrelay_cached_prompt_tokens_total") == 2
    assert gateway.metric("kvrelay_generated_tokens_total") == 6
    assert gateway.metric("kvrelay_time_to_first_token_seconds_count") == 2
    assert gateway.metric("kvrelay_inter_token_seconds_count") == 4
