"""The format of recorded runs: inputs, decisions and results, one step after the other.

It is the format of the recorded runs of vLLM's scheduler that the tests replay, with more keys
that those do not have (marked with +), because they say what only this scheduler can do or be told.

    config   the knobs, by name; block_size, num_blocks_including_null, ...
    steps    add, abort                requests that came and went before the step
             grammar_ready+, pause+, reset+
             connector, revoked+, kept+    what the connector answered
             expect                    what was decided, and the state right after it
             abort_during              requests that went while the step ran
             runner                    what the step (+ or with async_scheduling, the one before)
                                       computed, and which transfers ended
             after                     the state when that was processed
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol import ConfigError

Expect = dict[str, Any]


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


class TraceStep(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One step. With `async_scheduling`, `runner` and `after` are about the step before."""

    expect: Expect
    add: list[AddedRequest] = []
    abort: list[str] = []
    connector: list[tuple[str, int, int | None, bool]] = []
    abort_during: list[str] = []
    runner: RunnerResult | None = None
    after: Expect | None = None
    # +
    grammar_ready: list[str] = []
    pause: str | None = None  # the name of a `PauseState`
    reset: bool | None = None  # `reset_prefix_cache`, and whether running requests are reset
    revoked: list[str | None] = []  # answers of `revoke_pin`
    kept: list[str] = []  # requests for which `request_finished` said that blocks are kept


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
    if trace.format != 1:
        raise ConfigError("format", f"must be 1, not {trace.format}")
    return trace


def _parse_cut_off(data: bytes, error: msgspec.DecodeError) -> Trace:
    """A recorder that is killed leaves whole lines, each but the first a step, and no end."""
    lines = data.split(b"\n")
    for end in (len(lines) - 1, len(lines) - 2):
        whole = b"\n".join(lines[: max(end, 1)]).rstrip().removesuffix(b",")
        try:
            return msgspec.json.decode(whole + b"]}", type=Trace)
        except msgspec.DecodeError:
            continue
    raise ConfigError("trace", f"is no JSON: {error}") from error
