"""The options of `kvrelay serve`. What they set can be in cluster.yaml, too."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvrelay.cluster_options import CLUSTER_TOKEN, MIN_TOKEN_CHARACTERS, take_secret
from kvrelay.model_options import DEFAULT_MODEL, CacheDir, cache_dir_of
from kvrelay.stop_signals import end_on_stop_signals
from protocol import ConfigError
from scheduler import SchedulerKnobs


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="An alias (see `kvrelay models list`), a Hugging Face directory, a GGUF file, "
            "or a hub id."
        ),
    ] = DEFAULT_MODEL,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A file with these settings, such as cluster.yaml; what is given here wins."
        ),
    ] = None,
    # Nodes.
    topology: Annotated[
        str, typer.Option(help="disaggregated: prefill and decode nodes; unified: only one kind.")
    ] = "disaggregated",
    processes: Annotated[bool, typer.Option(help="Run each node in a process of its own.")] = False,
    prefill: Annotated[int, typer.Option(help="Number of prefill nodes.")] = 1,
    decode: Annotated[
        int, typer.Option(help="Number of decode nodes; with topology unified, of all nodes.")
    ] = 1,
    unified: Annotated[
        int, typer.Option(help="Number of unified nodes, beside or instead of the others.")
    ] = 0,
    policy: Annotated[str, typer.Option(help="Routing: kv_aware or round_robin.")] = "kv_aware",
    # How a node computes.
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads that compute on each node.",
            show_default="all cores, divided among those nodes that compute",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or one of several: cuda:1.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of weights and hidden states; on cuda bfloat16 or float16.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Of keys and values: as dtype, or bfloat16 on a CPU.")
    ] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(help="int8: weights in 8 bits (on a CPU).", show_default="none"),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="On a CPU: compiled, torch, or auto, whichever can be had.")
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="On cuda: flashinfer, varlen, or auto, whichever can be had.")
    ] = "auto",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            help="Compute a token to the same bits whatever else is computed with it (on a CPU)."
        ),
    ] = False,
    # The gateway.
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVRELAY_API_KEY",
            help="Accept only requests with one of these keys (all but /health and /metrics). May "
            "be given more than once; the variable, which others cannot see, separates by blanks.",
            show_default="no key is asked for",
        ),
    ] = None,
    # The cache.
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, in steps of 16.")] = 16,
    kv_memory: Annotated[str, typer.Option(help="KV cache of each node, e.g. 512MiB.")] = "1GiB",
    prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of prompts that begin alike.")
    ] = True,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt and its output.", show_default="the model's, up to 8192"
        ),
    ] = None,
    # The scheduler of each node: how large a step is,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that a node runs at once.")
    ] = SchedulerKnobs.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that a node can compute in one step.")
    ] = SchedulerKnobs.max_num_batched_tokens,
    max_num_scheduled_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that a node is given in one step.", show_default="all that it can compute"
        ),
    ] = SchedulerKnobs.max_num_scheduled_tokens,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            help="Plan a step while the one before it runs.",
            show_default="by node: on, but off on a CPU where no KV is moved",
        ),
    ] = SchedulerKnobs.async_scheduling,
    # how prompts are cut,
    enable_chunked_prefill: Annotated[
        bool, typer.Option(help="Compute a prompt in more than one step if need be.")
    ] = SchedulerKnobs.enable_chunked_prefill,
    long_prefill_token_threshold: Annotated[
        int,
        typer.Option(
            help="Prompt tokens of one request in a step, and above which a prompt is a long one; "
            "0: no limit."
        ),
    ] = SchedulerKnobs.long_prefill_token_threshold,
    max_num_partial_prefills: Annotated[
        int | None,
        typer.Option(help="Requests amid their prompt at once.", show_default="no limit"),
    ] = SchedulerKnobs.max_num_partial_prefills,
    max_long_partial_prefills: Annotated[
        int | None,
        typer.Option(help="Of those, requests with a long prompt.", show_default="no limit"),
    ] = SchedulerKnobs.max_long_partial_prefills,
    # who goes first,
    scheduling_policy: Annotated[
        str, typer.Option(help="fcfs: first come, first served; priority: the lowest number first.")
    ] = SchedulerKnobs.policy,
    waiting_preempts_running: Annotated[
        bool, typer.Option(help="With priority: running requests make room for more urgent ones.")
    ] = SchedulerKnobs.waiting_preempts_running,
    scheduler_reserve_full_isl: Annotated[
        bool, typer.Option(help="Admit a request only if the blocks of its whole prompt are free.")
    ] = SchedulerKnobs.scheduler_reserve_full_isl,
    # KV from other nodes,
    max_parked_blocks: Annotated[
        int | None,
        typer.Option(
            help="KV blocks of a node that may wait for KV from others.",
            show_default="half of them",
        ),
    ] = SchedulerKnobs.max_parked_blocks,
    kv_load_failure_policy: Annotated[
        str, typer.Option(help="Where KV did not arrive: recompute it, or fail the request.")
    ] = SchedulerKnobs.kv_load_failure_policy,
    # how it gets here,
    transport: Annotated[
        str,
        typer.Option(
            help="memory: within one process; shm: between processes of this machine; nixl: NIXL; "
            "auto: memory or shm."
        ),
    ] = "auto",
    layerwise: Annotated[
        bool, typer.Option(help="Send each layer of a prompt's last part as it is computed.")
    ] = False,
    checksums: Annotated[
        bool, typer.Option(help="Find out about KV that did not arrive as it was sent.")
    ] = True,
    on_transfer_failure: Annotated[
        str,
        typer.Option(
            help="When KV does not arrive: retry on another prefill node, recompute on the decode "
            "node, or fail."
        ),
    ] = "retry",
    # adapters and drafts.
    max_loras: Annotated[
        int | None,
        typer.Option(
            help="Different LoRA adapters in a step; the engine has none yet.",
            show_default="no limit",
        ),
    ] = SchedulerKnobs.max_loras,
    spec_method: Annotated[
        str | None,
        typer.Option(
            help="Who drafts tokens: ngram, draft_model or eagle; the engine takes none yet.",
            show_default="nobody",
        ),
    ] = SchedulerKnobs.spec_method,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Draft tokens of each request in a step.")
    ] = SchedulerKnobs.num_speculative_tokens,
    # This process.
    cache_dir: CacheDir = None,
    record_schedules: Annotated[
        Path | None,
        typer.Option(
            help="Record what each node's scheduler decides in this directory. The files hold the "
            "token ids of all prompts, and grow."
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a model on this machine: gateway, router, prefill and decode nodes."""
    set_up_logging(log_level)
    # Here, so that `kvrelay --help` does not wait for a web framework.
    from gateway import GatewayConfig
    from kvrelay.deployment import Deployment
    from kvrelay.serve_command import ServeCommand

    end_on_stop_signals(status=0)
    cluster_token = take_secret(CLUSTER_TOKEN, MIN_TOKEN_CHARACTERS)
    deployment = Deployment.read(config, given_options(context), path_option="config")
    with deployment.blaming():
        ServeCommand(
            deployment.settings.serve_config(cache_dir_of(cache_dir)),
            replace(deployment.settings.local_config(), record_schedules=record_schedules),
            GatewayConfig(api_keys=tuple(api_key or ())),
            Console(),
            cluster_token,
        ).run()


def given_options(context: typer.Context) -> dict[str, object]:
    """What was typed, by the names of the parameters; a default must not win over a file."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    typed = {name for name, source in sources.items() if source and source.name != "DEFAULT"}
    return {name: value for name, value in context.params.items() if name in typed}


def set_up_logging(level: str) -> None:
    names = ("debug", "info", "warning", "error")
    if level.lower() not in names:
        raise ConfigError("log-level", f"must be one of {', '.join(names)}, not {level!r}")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
