"""A scenario for `kvrelay schedule` as people write it: the keys of the YAML file.

    about: text                  what there is to see
    config: {max_num_seqs: 4}    any field of SchedulerConfig
    cache: {num_blocks: 10, block_size: 4, enable_prefix_caching: false}
    cached:                      prompts that are in the prefix cache before step 0
      - {name: handbook, tokens: 1000}
    requests:
      - {id: A, arrival: 2, prompt: 1020, output: 3, prefix: {name: handbook, tokens: 1000}}
      - {id: chat, count: 3, every: 2, prompt: 8, output: 4}     chat-1 to chat-3

Times are numbers of steps, lengths are tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from protocol import ConfigError
from scheduler import CacheConfig, SchedulerConfig
from scheduler.scenario import CachedPrefix, Prefix, Scenario, ScenarioRequest

# A scenario is small. A slip of the keyboard should be an error, not a machine without memory.
MAX_TOKENS = 1_000_000
MAX_BLOCKS = 1_000_000
MAX_COUNT = 1_000
MAX_NAME_LENGTH = 60


def _printable(text: str) -> str:
    """Without control characters, which a terminal would obey."""
    if not text.replace("\n", " ").isprintable():
        raise ValueError("must have no control characters")
    return text


def _name(text: str) -> str:
    if not text or text.split() != [text]:
        raise ValueError("must be one word")
    return _printable(text)


Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH), AfterValidator(_name)]
Length = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
StepNumber = Annotated[int, Field(ge=0, le=MAX_TOKENS)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _config_section() -> type[_Section]:
    """The fields of SchedulerConfig, whatever they are."""
    types = get_type_hints(SchedulerConfig)
    keys: dict[str, Any] = {f.name: (types[f.name], f.default) for f in fields(SchedulerConfig)}
    return create_model("ConfigSection", __base__=_Section, **keys)


ConfigSection = _config_section()


class CacheSection(_Section):
    num_blocks: Annotated[int, Field(ge=1, le=MAX_BLOCKS)] = 1024  # usable ones
    block_size: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 16  # tokens
    enable_prefix_caching: bool = True

    def build(self) -> CacheConfig:
        return CacheConfig(
            num_blocks=self.num_blocks + 1,  # the null block
            block_size=self.block_size,
            enable_prefix_caching=self.enable_prefix_caching,
            # So that blocks may be as small as an example on paper needs them.
            hash_block_size=self.block_size,
        )


class PrefixSection(_Section):
    name: Name
    tokens: Length

    def build(self) -> Prefix:
        return Prefix(name=self.name, tokens=self.tokens)


class CachedLine(PrefixSection):
    cache_salt: str | None = None
    lora: Name | None = None


class RequestLine(_Section):
    """One request, or `count` of them that arrive `every` so many steps."""

    id: Name
    prompt: Length
    output: Length
    arrival: StepNumber = 0
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    every: StepNumber = 0
    priority: int = 0
    prefix: PrefixSection | None = None
    cache_salt: str | None = None
    lora: Name | None = None
    abort: StepNumber | None = None

    def build(self) -> Iterator[ScenarioRequest]:
        for index in range(self.count):
            yield ScenarioRequest(
                id=self._id_of(index),
                prompt=self.prompt,
                output=self.output,
                arrival=self.arrival + index * self.every,
                priority=self.priority,
                prefix=None if self.prefix is None else self.prefix.build(),
                cache_salt=self.cache_salt,
                lora=self.lora,
                abort=self.abort,
            )

    def _id_of(self, index: int) -> str:
        """With leading zeros, because the priority policy compares ids as text."""
        if self.count == 1:
            return self.id
        return f"{self.id}-{index + 1:0{len(str(self.count))}}"


class ScheduleFile(_Section):
    about: Annotated[str, AfterValidator(_printable)] = ""
    config: ConfigSection = Field(default_factory=ConfigSection)  # type: ignore[valid-type]
    cache: CacheSection = Field(default_factory=CacheSection)
    cached: list[CachedLine] = Field(default_factory=list)
    requests: list[RequestLine]

    _scenario: Scenario = PrivateAttr()

    @property
    def scenario(self) -> Scenario:
        return self._scenario

    @model_validator(mode="after")
    def _build(self) -> Self:
        """What the scheduler and the scenario do not accept is an error of this file, too."""
        with _located(self.config, "config"):
            config = SchedulerConfig(**dict(self.config))
        with _located(self.cache, "cache"):
            cache = self.cache.build()
        requests: list[ScenarioRequest] = []
        for index, line in enumerate(self.requests):
            with _located(line, "requests", index):
                requests += line.build()
        cached = [
            CachedPrefix(prefix=line.build(), cache_salt=line.cache_salt, lora=line.lora)
            for line in self.cached
        ]
        with _located(self):
            self._scenario = Scenario(config=config, cache=cache, requests=requests, cached=cached)
        return self


@contextlib.contextmanager
def _located(section: BaseModel, *place: str | int) -> Iterator[None]:
    """Let a ConfigError say where in the file its field stands."""
    try:
        yield
    except ConfigError as error:
        given = error.field in section.model_fields_set
        problem = error.problem if given else f"{error.field} {error.problem}"
        details = InitErrorDetails(
            type=PydanticCustomError("config", "{problem}", {"problem": problem}),
            loc=(*place, error.field) if given else place,
            input=None,
        )
        raise ValidationError.from_exception_data("ScheduleFile", [details]) from error
