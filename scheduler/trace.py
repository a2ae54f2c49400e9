"""The format of recorded runs: inputs, decisions and results, one step after the other.

It is the format of the recorded runs of vLLM's scheduler that the tests replay, with more keys
that those do not have (marked with +), because they say what only this scheduler can do or be told.

    config   the knobs, by name; block_size, num_blocks_including_null, ...
    steps    draft_token_ids+             drafts that did not come with the results of a step
             add, grammar_ready+, pause+, abort
             reset+
             connector, revoked+, kept+   what the connector answered
             expect                       what was decided, and the state right after it
             abort_during                 requests that went while the step ran
             runner                       what the oldest step that has no results yet computed,
                                          which transfers ended, and the drafts for the next one
             after                        the state when that was processed

Things happen in this order, and what is absent did not happen. Without `expect` no step was
decided: something happened at a time at which this order has no place for it. Without `runner` the
results came later, or never did. So the results of a step stand beside its decision if they came
before the next one was made, and beside the next one with asynchronous scheduling.

An id may come again when its request has ended and holds no blocks any more.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, BinaryIO, Literal

import msgspec

from protocol import ConfigError

Expect = dict[str, Any]
PauseName = Literal["UNPAUSED", "PAUSED_NEW", "PAUSED_ALL"]
EndName = Literal["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ERROR"]

_FORMAT = 1

logger = logging.getLogger(__name__)


class TraceConfig(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The knobs, named as in `SchedulerConfig`, and the geometry of the pool."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks_including_null: int
    enable_chunked_prefill: bool = True
    max_num_scheduled_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    watermark: None = None
    num_speculative_tokens: int = 0
    spec_method: str | None = None
    num_lookahead_tokens: int | None = None  # follows from the two above
    max_loras: int | None = None
    kv_connector: bool = False
    kv_load_failure_policy: str | None = None
    # +
    hash_block_size: int | None = None  # None: the block size
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    waiting_preempts_running: bool = False
    max_parked_blocks: int | None = None
    async_scheduling: bool = False


class AddedRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request as it came."""

    id: str
    prompt_token_ids: list[int]
    max_tokens: int
    arrival_time: float
    priority: int = 0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    eos_token_id: int | None = None
    cache_salt: str | None = None
    lora: int | None = None
    send_steps: int | None = None
    # Only for reading.
    ignore_eos: bool = False
    external_matched_tokens: int | None = None
    external_async: bool | None = None
    external_steps: int | None = None
    external_none_first: int | None = None
    external_retry: bool | int | None = None
    # +
    lora_name: str | None = None
    eos_token_ids: list[int] = []
    forced_token_ids: list[int] = []
    awaits_grammar: bool = False


class RunnerResult(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What a step computed, and what became of transfers meanwhile.

    `finished_recving` is a list of ids or, if tokens came with them (+), a mapping.
    """

    sampled: dict[str, list[int]] = {}
    draft: dict[str, list[int]] = {}
    invalid_block_ids: list[int] = []
    invalid_blocks: list[tuple[str, int]] = []
    finished_recving: list[str] | dict[str, list[int]] = []
    finished_sending: list[str] = []
    revoked_recving: list[str] = []  # +


class TraceStep(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What happened, up to and including one decision and the results of one step."""

    draft_token_ids: dict[str, list[int]] = {}  # +
    add: list[AddedRequest] = []
    grammar_ready: list[str] = []  # +
    pause: PauseName | None = None  # +
    abort: list[str] = []
    reset: bool | None = None  # + `reset_prefix_cache`, and whether running requests are reset
    connector: list[tuple[str, int, int | None, bool]] = []
    revoked: list[str | None] = []  # + answers of `revoke_pin`; None when they are used up
    kept: list[str] = []  # + requests for which `request_finished` said that blocks are kept
    expect: Expect | None = None
    abort_during: list[str] = []
    ended_as: dict[str, EndName] = {}  # + how, of `abort` and `abort_during`; else aborted
    runner: RunnerResult | None = None
    after: Expect | None = None


class Trace(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A recorded run."""

    config: TraceConfig
    steps: list[TraceStep]
    format: int = 1
    source: str = ""
    name: str = ""
    about: str = ""


def parse_trace(data: bytes) -> Trace:
    """A trace from its JSON. One that was cut off in the middle of a step ends before it.

    Raises:
        ConfigError: it is no trace, or one of another format.
    """
    try:
        trace = msgspec.json.decode(data, type=Trace)
    except msgspec.ValidationError as error:
        raise ConfigError("trace", f"is not in the trace format: {error}") from error
    except msgspec.DecodeError as error:
        trace = _parse_cut_off(data, error)
    if trace.format != _FORMAT:
        raise ConfigError("format", f"must be {_FORMAT}, not {trace.format}")
    return trace


def _parse_cut_off(data: bytes, error: msgspec.DecodeError) -> Trace:
    """A recorder that is killed leaves whole lines, each but the first a step, and no end.

    The last line may be a part of a step, and the one before is whole.
    """
    lines = data.rstrip().split(b"\n")
    for num_lines in (len(lines), len(lines) - 1):
        whole = b"\n".join(lines[:num_lines]).rstrip().removesuffix(b",")
        try:
            return msgspec.json.decode(whole + b"]}", type=Trace)
        except msgspec.DecodeError as still:
            if isinstance(still, msgspec.ValidationError) and num_lines < len(lines):
                raise ConfigError("trace", f"is not in the trace format: {still}") from still
    raise ConfigError("trace", f"is no JSON: {error}") from error


class TraceWriter:
    """Writes a trace step by step. What is there can be read at any time.

    A file that cannot be written any more is given up, with a word in the log: whatever is
    recorded goes on.
    """

    def __init__(self, stream: BinaryIO, config: TraceConfig, name: str = "") -> None:
        self._stream: BinaryIO | None = stream
        self._name = name
        header = {"format": _FORMAT, "source": "kvrelay", "name": name, "config": config}
        self._write(msgspec.json.encode(header).removesuffix(b"}") + b',"steps":[')
        self._separator = b"\n"

    def write(self, step: TraceStep) -> None:
        self._write(self._separator + msgspec.json.encode(step))
        self._separator = b",\n"

    def close(self) -> None:
        """The trace ends here; later steps are dropped."""
        self._write(b"\n]}\n")
        self._drop()

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            logger.error("the recording of %s ends here: %s", self._name, error)
            self._drop()

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError):  # what it could not write, it tries again
                stream.close()
