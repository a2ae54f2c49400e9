"""Takes all ways, one after the other, and compares what comes out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from cluster.config import LocalConfig
from cluster.exactness.comparison import (
    ComparedLogits,
    Difference,
    Mismatch,
    ReferenceLogits,
    prompt_of,
)
from cluster.exactness.evidence import Evidence
from cluster.exactness.prompts import ExactnessConfig, Prompt, make_prompts
from cluster.exactness.taken_way import TakenWay
from cluster.exactness.ways import Way, all_ways, reference_way
from cluster.node_compute import RunnerFactory
from cluster.torch_compute import TorchModel, torch_compute
from engine.weights import ModelFiles
from protocol import ConfigError, KvrelayError

MakeCompute = Callable[[LocalConfig], RunnerFactory]


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """What a way of computing came to."""

    name: str
    seconds: float
    num_compared: int = 0  # (request, output position)
    num_equal: int = 0  # bit for bit
    difference: Difference | None = None  # the first one
    other_tokens: tuple[str, ...] = ()  # requests whose output is another one
    evidence: Evidence = field(default_factory=lambda: Evidence("", happened=False))
    error: str | None = None  # a request could not be answered
    skipped: str | None = None  # why it could not be tried here

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against it."""
        if self.skipped is not None:
            return True
        equal = 0 < self.num_compared == self.num_equal and not self.other_tokens
        return equal and self.evidence.happened and self.error is None


class Verification:
    """Of one model. Its weights are loaded once."""

    def __init__(
        self, files: ModelFiles, config: ExactnessConfig, make_compute: MakeCompute | None = None
    ) -> None:
        """`make_compute`: what computes on the nodes of a cluster, by default the engine itself.

        Raises:
            ConfigError: a setting does not go with this machine or this model.
            ModelError: the weights cannot be loaded.
        """
        self.prompts = make_prompts(config, files.config)
        self._reference_way = reference_way(config, self.prompts)
        self.ways = all_ways(config, self.prompts)
        if make_compute is None:
            loaded = TorchModel.load(files, self._reference_way.config.engine)
            make_compute = partial(torch_compute, files, loaded=loaded)
        self._files = files
        self._make_compute = make_compute
        self._by_name: Mapping[str, Prompt] = {prompt.name: prompt for prompt in self.prompts}
        self._answers: Mapping[str, list[int]] = {}  # of the reference, by the prompt

    def describe(self) -> str:
        """What is asked."""
        lengths = [len(prompt.token_ids) for prompt in self.prompts]
        outputs = self.prompts[0].sampling.max_tokens
        return (
            f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens and {outputs} more "
            f"each, in {len(self.names)} ways"
        )

    @property
    def names(self) -> list[str]:
        """Of all ways, in the order in which they are taken."""
        return [way.name for way in self.all_ways]

    @property
    def all_ways(self) -> list[Way]:
        """The reference, and those that are compared with it."""
        return [self._reference_way, *self.ways]

    async def run(self) -> AsyncIterator[WayResult]:
        """The reference, compared with itself as a second run makes it; then the other ways.

        Raises KvrelayError: there is no reference.
        """
        logits = ReferenceLogits()
        taken = await self._take(self._reference_way, logits)
        self._answers = {prompt_of(name): tokens for name, tokens in taken.answers.items()}
        for way in self.all_ways:
            yield await self._compare(way, logits)

    async def _compare(self, way: Way, reference: ReferenceLogits) -> WayResult:
        began = time.monotonic()
        logits = ComparedLogits(reference)
        result = partial(WayResult, name=way.name)
        try:
            taken = await self._take(way, logits)
        except ConfigError as missing:
            if not way.optional:
                raise
            return result(seconds=time.monotonic() - began, skipped=str(missing))
        except KvrelayError as error:
            return result(seconds=time.monotonic() - began, error=str(error))
        seconds = time.monotonic() - began
        first = logits.first
        return result(
            seconds=seconds,
            num_compared=logits.num_compared,
            num_equal=logits.num_equal,
            difference=None if first is None else await self._difference(first),
            other_tokens=self._other_tokens(taken.answers),
            evidence=way.find_evidence(taken.traces),
        )

    async def _take(self, way: Way, logits: ReferenceLogits | ComparedLogits) -> TakenWay:
        return await TakenWay.take(
            way, self._files, self._make_compute(way.config), self.prompts, logits
        )

    def _other_tokens(self, answers: Mapping[str, list[int]]) -> tuple[str, ...]:
        return tuple(
            request_id
            for request_id, tokens in answers.items()
            if tokens != self._answers[prompt_of(request_id)]
        )

    async def _difference(self, mismatch: Mismatch) -> Difference:
        """Only digests were kept of the reference, so that place is computed again."""
        prompt = self._by_name[mismatch.place.prompt]
        logits = ReferenceLogits(keep=frozenset({mismatch.place}))
        way = self._reference_way
        await TakenWay.take(way, self._files, self._make_compute(way.config), [prompt], logits)
        reference = logits.kept[mismatch.place]
        return Difference.between(mismatch, reference, len(prompt.token_ids))
