"""Logits bit for bit: what is kept of a reference, and what is found to differ from it."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor


class Place(NamedTuple):
    """The logits that an output token was chosen by. The earliest places sort first."""

    position: int  # in the output
    prompt: str


class LogitSink(ABC):
    """Takes in the logits of all nodes of a cluster, whose threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def note(self, rows: Sequence[tuple[str, int]], logits: Tensor) -> None:
        """`logits` is `[len(rows), vocab_size]`; as `ModelRunner.on_logits`."""
        assert logits.dtype is torch.float32
        places = [Place(position, prompt_of(request_id)) for request_id, position in rows]
        for place, row in zip(places, logits.contiguous(), strict=True):
            digest = digest_of(row)  # takes time: before others have to wait
            with self._lock:
                self._take(place, row, digest)

    @abstractmethod
    def _take(self, place: Place, row: Tensor, digest: bytes) -> None: ...


class ReferenceLogits(LogitSink):
    """Remembers the digests of all places, and the logits of a few."""

    def __init__(self, keep: frozenset[Place] = frozenset()) -> None:
        super().__init__()
        self.digests: dict[Place, bytes] = {}
        self.kept: dict[Place, Tensor] = {}  # [vocab_size]
        self._keep = keep

    def _take(self, place: Place, row: Tensor, digest: bytes) -> None:
        assert place not in self.digests, f"{place} was computed twice, undisturbed"
        self.digests[place] = digest
        if place in self._keep:
            self.kept[place] = row.clone()


@dataclass
class Mismatch:
    """Logits that are not those of the reference."""

    place: Place
    logits: Tensor  # [vocab_size]


class ComparedLogits(LogitSink):
    """Compares with the reference what it has, too: also what is computed for a second time."""

    def __init__(self, reference: ReferenceLogits) -> None:
        super().__init__()
        self.num_compared = 0
        self.num_equal = 0
        self.first: Mismatch | None = None  # the earliest one, of all prompts
        self._digests = reference.digests

    def _take(self, place: Place, row: Tensor, digest: bytes) -> None:
        expected = self._digests.get(place)
        if expected is None:
            return  # planned before the output was known to end
        self.num_compared += 1
        if digest == expected:
            self.num_equal += 1
        elif self.first is None or place < self.first.place:
            self.first = Mismatch(place, row.clone())


@dataclass(frozen=True)
class Difference:
    """The first logits that are not those of the reference."""

    prompt: str
    num_prompt_tokens: int
    position: int
    num_logits: int  # that differ
    num_all: int
    largest: float  # NaN, if one of them is not a number

    @classmethod
    def between(cls, mismatch: Mismatch, reference: Tensor, num_prompt_tokens: int) -> Difference:
        logits = mismatch.logits
        bits, expected = logits.view(torch.int32), reference.view(torch.int32)
        largest = (logits.double() - reference.double()).abs().max().item()
        return cls(
            prompt=mismatch.place.prompt,
            num_prompt_tokens=num_prompt_tokens,
            position=mismatch.place.position,
            num_logits=int((bits != expected).sum().item()),
            num_all=len(logits),
            largest=largest,
        )


def prompt_of(request_id: str) -> str:
    """The prompt that a request asks, whichever time and whichever attempt it is."""
    return request_id.partition("/")[0].partition("#")[0]


def digest_of(row: Tensor) -> bytes:
    """Of the bytes of a contiguous tensor, 128 bits."""
    size = row.numel() * row.element_size()
    return xxhash.xxh3_128_digest((ctypes.c_char * size).from_address(row.data_ptr()))
