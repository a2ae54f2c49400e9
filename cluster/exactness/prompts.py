"""What is asked in every way: prompts of all lengths, some of which begin alike."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from engine import EngineConfig
from engine.weights import ModelConfig
from protocol import ConfigError, SamplingParams

# Around blocks, around the sizes of chunks, and a few that are long.
_LENGTHS = (
    *(8, 15, 16, 17, 30, 33, 47, 48, 64, 65, 90, 128),
    *(12, 180, 100, 24, 300, 40, 75, 20, 150, 55, 9, 112),
)
_SHORTEST = min(_LENGTHS)
_MIN_PROMPTS = 8  # with fewer, nobody has to make room for anybody
_MIN_TOKENS, _MAX_TOKENS = 8, 1024
_NUM_SHARED = 48  # tokens with which every third prompt begins


@dataclass(frozen=True, kw_only=True)
class ExactnessConfig:
    """What is asked, and of what kind of engine.

    Raises:
        ConfigError: a value is out of its range, or this engine can never be batch-invariant.
    """

    prompts: int = 24
    max_tokens: int = 16  # of each output
    threads: int | None = None  # None: all cores
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.prompts < _MIN_PROMPTS:
            raise ConfigError("prompts", f"must be at least {_MIN_PROMPTS}, not {self.prompts}")
        if not _MIN_TOKENS <= self.max_tokens <= _MAX_TOKENS:
            raise ConfigError(
                "max_tokens",
                f"must be from {_MIN_TOKENS} to {_MAX_TOKENS}, not {self.max_tokens}",
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError("threads", f"must be at least 1, not {self.threads}")
        if self.engine.is_cuda:
            raise ConfigError("device", f"must be cpu, not {self.engine.device}")

    @property
    def invariant_engine(self) -> EngineConfig:
        """Raises ConfigError: there is no such engine."""
        return replace(self.engine, batch_invariant=True)


@dataclass(frozen=True)
class Prompt:
    """One question. Its name is the beginning of the ids of all requests that ask it."""

    name: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams

    @property
    def num_tokens(self) -> int:
        """At the end, with its output."""
        return len(self.token_ids) + self.sampling.max_tokens


def make_prompts(config: ExactnessConfig, model: ModelConfig) -> list[Prompt]:
    """The same ones for the same settings; every other one is sampled with a seed.

    Raises:
        ConfigError: the model was not made for so many tokens.
    """
    longest = model.max_position_embeddings - config.max_tokens
    if longest < _SHORTEST:
        raise ConfigError(
            "max_tokens",
            f"must be at most {model.max_position_embeddings - _SHORTEST}: the model was made for "
            f"{model.max_position_embeddings} tokens",
        )
    lengths = [min(_LENGTHS[i % len(_LENGTHS)], longest) for i in range(config.prompts)]
    rng = random.Random(config.prompts)
    shared = [rng.randrange(model.vocab_size) for _ in range(_NUM_SHARED)]
    prompts = []
    for index, length in enumerate(lengths):
        own = [rng.randrange(model.vocab_size) for _ in range(length)]
        ids = (shared + own)[:length] if index % 3 == 2 and length > _NUM_SHARED else own
        sampling = _sampling(index, config.max_tokens)
        prompts.append(Prompt(f"prompt-{index}", tuple(ids), sampling))
    return prompts


def _sampling(index: int, max_tokens: int) -> SamplingParams:
    """No end is a reason to stop: all outputs have the same length."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=index, max_tokens=max_tokens)
