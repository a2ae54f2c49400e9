"""Every field of sampling over HTTP, from prefill node to decode node, and what it does there."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import httpx
import pytest

from tests.e2e.serve_process import ServeProcess

PROMPT = list(range(30, 70))
CHAT = [{"role": "user", "content": "the way of all things"}]
PATHS = ["/v1/completions", "/v1/chat/completions"]
BOTH = pytest.mark.parametrize("path", PATHS)
VOCAB_SIZE = 320
COMMON: dict[str, Any] = {
    "model": "tiny-llama",
    "max_tokens": 24,
    "ignore_eos": True,
    "return_token_ids": True,
}


def ask(server: ServeProcess, path: str, **fields: object) -> list[dict[str, Any]]:
    """The choices."""
    prompt = {"prompt": PROMPT} if path == PATHS[0] else {"messages": CHAT}
    with server.client() as client:
        answer = client.post(path, json={**COMMON, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def tokens(server: ServeProcess, path: str, **fields: object) -> list[int]:
    ids: list[int] = ask(server, path, **fields)[0]["token_ids"]
    return ids


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"logit_bias": {}},
        {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    ],
    ids=str,
)
def test_what_leaves_one_token_is_greedy(
    tiny_server: ServeProcess, path: str, fields: dict[str, Any]
) -> None:
    greedy = tokens(tiny_server, path, temperature=0)
    temperature = 0 if "logit_bias" in fields or "repetition_penalty" in fields else 1.5
    assert tokens(tiny_server, path, **{"temperature": temperature, "seed": 1} | fields) == greedy
    assert tokens(tiny_server, path, temperature=1.5, seed=1) != greedy


@BOTH
def test_a_seed_gives_the_same_again(tiny_server: ServeProcess, path: str) -> None:
    first, again, other = (tokens(tiny_server, path, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


@BOTH
@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_spread_the_output(tiny_server: ServeProcess, path: str, penalty: str) -> None:
    fields = {"temperature": 0.3, "seed": 3, "max_tokens": 100}
    spread, plain, narrow = (
        len(set(tokens(tiny_server, path, **fields, **{penalty: strength})))
        for strength in (2, 0, -2)
    )
    assert spread > plain > narrow


def test_the_repetition_penalty_knows_the_prompt(tiny_server: ServeProcess) -> None:
    """One token of the prompt is far ahead of all others, until it is divided by two."""
    fields = {"temperature": 0, "max_tokens": 1, "logit_bias": {str(PROMPT[0]): 90, "299": 70}}
    assert tokens(tiny_server, PATHS[0], **fields) == [PROMPT[0]]
    assert tokens(tiny_server, PATHS[0], **fields, repetition_penalty=2) == [299]
    assert tokens(tiny_server, PATHS[0], **fields, presence_penalty=2) == [PROMPT[0]]


@BOTH
def test_the_repetition_penalty_knows_the_output(tiny_server: ServeProcess, path: str) -> None:
    many = {str(token): 100 for token in range(270, 300)}
    strong = tokens(
        tiny_server, path, temperature=0, logit_bias=many, repetition_penalty=2, max_tokens=24
    )
    assert len(set(strong)) == len(strong)
    assert set(strong) <= set(range(270, 300))


@BOTH
def test_a_bias_rules(tiny_server: ServeProcess, path: str) -> None:
    assert tokens(tiny_server, path, logit_bias={"65": 100}, temperature=0.5) == [65] * 24
    greedy = tokens(tiny_server, path, temperature=0)
    without = tokens(tiny_server, path, temperature=0, logit_bias={str(greedy[0]): -100})
    assert greedy[0] not in without


@BOTH
def test_min_tokens_come_before_any_end(tiny_server: ServeProcess, path: str) -> None:
    stop = list(range(10, 300))  # nearly everything
    fields = {"stop_token_ids": stop, "temperature": 0, "logit_bias": {"300": 20}}
    for min_tokens in (0, 1, 2, 9, 24):
        (choice,) = ask(tiny_server, path, **fields, min_tokens=min_tokens)
        ids = choice["token_ids"]
        assert len(ids) >= min_tokens
        assert not set(stop) & set(ids[:min_tokens])
    (choice,) = ask(tiny_server, path, temperature=0, stop_token_ids=[65], logit_bias={"65": 100})
    assert (choice["token_ids"], choice["finish_reason"]) == ([65], "stop")
    ended = ask(
        tiny_server,
        path,
        temperature=0,
        stop_token_ids=[65],
        logit_bias={"65": 100, "66": 50},
        min_tokens=7,
    )[0]
    assert (ended["token_ids"], ended["stop_reason"]) == ([66] * 7 + [65], 65)


@BOTH
def test_choices_are_those_of_the_next_seeds(tiny_server: ServeProcess, path: str) -> None:
    together = ask(tiny_server, path, n=5, seed=70)
    assert [choice["index"] for choice in together] == list(range(5))
    alone = [tokens(tiny_server, path, seed=70 + i) for i in range(5)]
    assert [choice["token_ids"] for choice in together] == alone
    assert len({tuple(ids) for ids in alone}) == 5


def test_the_prompt_of_many_choices_travels_once(tiny_server: ServeProcess) -> None:
    prompt = [*range(20, 250), *range(60, 180)]
    before = [tiny_server.node("prefill"), tiny_server.node("decode")]
    with tiny_server.client() as client:
        body = {**COMMON, "prompt": prompt, "n": 16, "max_tokens": 3, "seed": 1}
        usage = client.post(PATHS[0], json=body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 16 * 3
    tiny_server.wait_until_at_rest()
    after = [tiny_server.node("prefill"), tiny_server.node("decode")]
    block = after[0]["block_size"]
    once = len(prompt) + 15 * (len(prompt) % block or block)
    computed, loaded = (
        new[f"num_prompt_tokens_{key}"] - old[f"num_prompt_tokens_{key}"]
        for old, new, key in zip(before, after, ("computed", "loaded"), strict=True)
    )
    assert computed <= once
    assert loaded <= once


def test_logprobs_of_a_completion(tiny_server: ServeProcess) -> None:
    (choice,) = ask(tiny_server, PATHS[0], logprobs=4, return_tokens_as_token_ids=True, seed=1)
    logprobs, ids = choice["logprobs"], choice["token_ids"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in ids]
    assert len(logprobs["text_offset"]) == len(ids)
    for token, own, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == own <= 0
        assert len(top) in (4, 5)
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5
    streamed: dict[str, list[Any]] = {name: [] for name in logprobs}
    for piece in stream(tiny_server, PATHS[0], logprobs=4, return_tokens_as_token_ids=True, seed=1):
        for name, values in piece["logprobs"].items():
            streamed[name] += values
    assert streamed["tokens"] == logprobs["tokens"]
    assert streamed["text_offset"] == logprobs["text_offset"]
    assert streamed["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-4)


def test_logprobs_of_a_chat(tiny_server: ServeProcess) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    (choice,) = ask(tiny_server, PATHS[1], **fields)
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        best = entry["top_logprobs"][0]
        assert (best["token"], best["bytes"]) == (entry["token"], entry["bytes"])
        assert best["logprob"] == entry["logprob"]
    pieces = stream(tiny_server, PATHS[1], **fields)
    told = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
    assert [entry["token"] for entry in told] == [entry["token"] for entry in content]


def stream(server: ServeProcess, path: str, **fields: object) -> list[dict[str, Any]]:
    """The choice of each chunk."""
    prompt = {"prompt": PROMPT} if path == PATHS[0] else {"messages": CHAT}
    body = {**COMMON, **prompt, "stream": True, **fields}
    with server.client() as client, client.stream("POST", path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [httpx.Response(200, text=line).json()["choices"][0] for line in lines]


def test_the_first_token_is_drawn_as_its_logprob_says(tiny_server: ServeProcess) -> None:
    """By the prefill node, with seeds that follow each other."""
    fields = {"max_tokens": 1, "top_k": 8}
    told = ask(tiny_server, PATHS[0], **fields, logprobs=8, return_tokens_as_token_ids=True)
    likeliest = sorted(told[0]["logprobs"]["top_logprobs"][0].items(), key=lambda item: -item[1])[
        :8
    ]
    weights = {int(name.partition(":")[2]): math.exp(logprob) for name, logprob in likeliest}
    drawn = Counter(
        choice["token_ids"][0]
        for seed in range(0, 1000, 100)
        for choice in ask(tiny_server, PATHS[0], n=100, seed=seed, **fields)
    )
    assert drawn.keys() <= weights.keys()
    share = drawn.total() / sum(weights.values())
    statistic = sum((drawn[t] - w * share) ** 2 / (w * share) for t, w in weights.items())
    assert abs(statistic - 7) < 4 * math.sqrt(2 * 7)


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 3),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.01),
        ("presence_penalty", -2.01),
        ("frequency_penalty", 2.01),
        ("repetition_penalty", 0),
        ("logit_bias", {str(10**6): 1}),
        ("logprobs", "yes"),
        ("top_logprobs", 5),
        ("min_tokens", 25),
        ("stop_token_ids", ["a"]),
        ("n", 0),
        ("seed", 0.5),
    ],
)
def test_wrong_values_name_their_field(
    tiny_server: ServeProcess, path: str, name: str, value: object
) -> None:
    prompt = {"prompt": PROMPT} if path == PATHS[0] else {"messages": CHAT}
    with tiny_server.client() as client:
        answer = client.post(path, json={**COMMON, **prompt, name: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition("[")[0] == name
