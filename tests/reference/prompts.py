"""The prompts of the reference: every length that could go wrong, and prefixes worth caching."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer

BLOCK_SIZE = 16
_NUM_ORDINARY_TOKENS = 49_000  # of the vocabulary; what follows and the first 17 are special
_FIRST_ORDINARY_TOKEN = 17

Chat = Callable[[list[dict[str, str]]], list[int]]

_QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "List three uses of a paper clip.",
    "Explain to a child why the sky is blue.",
    "Translate 'good morning' into Spanish, Italian and German.",
    "How many legs do three spiders and two ants have together?",
)

_RULES = (
    "You answer for a small bookshop in a harbour town. The shop opens at nine and closes at six,"
    " and on Sundays it is closed. Be brief, be friendly, and never invent a title."
    " Our shelves, from the door to the back wall, hold the following. "
)


def reference_prompts(tokenizer: Tokenizer, chat: Chat) -> Iterator[tuple[str, list[int]]]:
    """(name, token ids) of every case."""
    yield from _block_boundaries(tokenizer)
    yield from _random_ids()
    yield from (
        (f"chat_{index}", chat([{"role": "user", "content": question}]))
        for index, question in enumerate(_QUESTIONS)
    )
    yield (
        "chat_turns",
        chat(
            [
                {"role": "system", "content": "You are a patient teacher of arithmetic."},
                {"role": "user", "content": "What is 7 times 8?"},
                {"role": "assistant", "content": "7 times 8 is 56."},
                {"role": "user", "content": "And what do I get if I add 4 to that?"},
            ]
        ),
    )
    yield from _shared_prefix(chat)
    for length in (200, 511, 512, 513, 1024, 1500):
        yield f"inventory_{length}", tokenizer.encode(inventory(length, 200)).ids[:length]


def inventory(seed: int, num_lines: int) -> str:
    """Text of any length that is neither random nor repetitive."""
    rng = random.Random(seed)
    colours = ("red", "blue", "green", "yellow", "black", "white", "golden", "silver")
    things = ("lamp", "kettle", "compass", "atlas", "clock", "novel", "chair", "violin", "map")
    places = ("by the window", "under the stairs", "on the top shelf", "behind the counter")
    lines = (
        f"Item {number}: the {rng.choice(colours)} {rng.choice(things)} {rng.choice(places)}"
        f" costs {rng.randrange(2, 90)} coins and is {rng.randrange(3, 200)} years old."
        for number in range(1, num_lines + 1)
    )
    return " ".join(lines)


def _block_boundaries(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    text = tokenizer.encode(
        "The lighthouse keeper climbed the stairs every evening to light the lamp. One night, as"
        " the storm was rising over the bay, he saw a small boat without a sail, and in it"
    ).ids
    for length in (1, 2, 15, 16, 17, 31, 32, 33):
        assert len(text) >= length
        yield f"text_{length}", text[:length]


def _random_ids() -> Iterator[tuple[str, list[int]]]:
    for length in (1, 16, 48, 129, 400):
        rng = random.Random(length)
        ids = [rng.randrange(_FIRST_ORDINARY_TOKEN, _NUM_ORDINARY_TOKENS) for _ in range(length)]
        yield f"random_{length}", ids


def _shared_prefix(chat: Chat) -> Iterator[tuple[str, list[int]]]:
    """Chats with one long system prompt, two of them with a first turn in common as well."""
    system = {"role": "system", "content": _RULES + inventory(7, 12)}
    question = {"role": "user", "content": "What is the oldest thing that you have?"}
    answer = {"role": "assistant", "content": "Let me have a look at the shelves."}
    for name, turns in {
        "hours": [{"role": "user", "content": "Are you open on Sunday?"}],
        "oldest": [question],
        "cheapest": [question, answer, {"role": "user", "content": "And the cheapest?"}],
        "price": [question, answer, {"role": "user", "content": "How much is it in total?"}],
    }.items():
        yield f"shop_{name}", chat([system, *turns])
