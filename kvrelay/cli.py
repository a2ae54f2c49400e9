"""The command line. Thin: options in, settings out; errors become one line and an exit status."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from kvrelay import __version__
from kvrelay.stop_signals import end_on_stop_signals
from protocol import ConfigError, KvrelayError

DEFAULT_MODEL = "smollm2-135m"

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options off in a narrow terminal
)
models = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="Find, fetch and convert models."
)
app.add_typer(models, name="models")

CacheDir = Annotated[
    Path | None,
    typer.Option(
        envvar="KVRELAY_CACHE_DIR",
        help="Where fetched and converted models are kept.",
        show_default="~/.cache/kvrelay",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvrelay {__version__}")
        raise typer.Exit


@models.callback()
def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.callback()
def kvrelay(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Prefill/decode-disaggregated LLM serving."""
    _help_without_command(context)


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(wanted=True)


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="An alias (see `kvrelay models list`), a Hugging Face directory, a GGUF file, "
            "or a hub id."
        ),
    ] = DEFAULT_MODEL,
    topology: Annotated[
        str, typer.Option(help="disaggregated: prefill and decode nodes; unified: one kind.")
    ] = "disaggregated",
    prefill: Annotated[
        int | None, typer.Option(help="Number of prefill nodes.", show_default="1")
    ] = None,
    decode: Annotated[
        int, typer.Option(help="Number of decode nodes; with topology unified, of all nodes.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block, in steps of 16.")] = 16,
    kv_memory: Annotated[str, typer.Option(help="KV cache of each node, e.g. 512MiB.")] = "1GiB",
    max_num_seqs: Annotated[int, typer.Option(help="Requests that a node runs at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens that a node computes in one step.")
    ] = 512,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt and its output.", show_default="the model's, up to 8192"
        ),
    ] = None,
    policy: Annotated[str, typer.Option(help="Routing: kv_aware or round_robin.")] = "kv_aware",
    prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV of prompts that begin alike.")
    ] = True,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="KVRELAY_API_KEY",
            help="Accept only requests with one of these keys (all but /health and /metrics). May "
            "be given more than once; the variable, which others cannot see, separates by blanks.",
            show_default="no key is asked for",
        ),
    ] = None,
    cache_dir: CacheDir = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Serve a model on this machine: gateway, router, prefill and decode nodes in one process."""
    _set_up_logging(log_level)
    # Here, so that `kvrelay --help` does not wait for a web framework.
    from cluster import LocalConfig, ServeConfig, Topology
    from gateway import GatewayConfig
    from kvrelay.serve_command import ServeCommand
    from kvrelay.sizes import parse_size
    from router import RouterConfig, get_policy

    end_on_stop_signals(status=0)
    get_policy(policy)
    if Topology.parse(topology) is Topology.UNIFIED and prefill is not None:
        raise ConfigError("prefill", "a unified cluster has none; --decode is its number of nodes")
    ServeCommand(
        ServeConfig(host=host, port=port, model=model, cache_dir=_cache_dir(cache_dir)),
        LocalConfig(
            topology=Topology.parse(topology),
            num_prefill=1 if prefill is None else prefill,
            num_decode=decode,
            block_size=block_size,
            kv_memory_bytes=parse_size("kv-memory", kv_memory),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
            router=RouterConfig(policy=policy),
        ),
        GatewayConfig(api_keys=tuple(api_key or ())),
        Console(),
    ).run()


@models.command("list")
def list_models() -> None:
    """The models that can be named by an alias."""
    from engine.weights import BUILTIN_MODELS

    for alias in sorted(BUILTIN_MODELS):
        typer.echo(alias)


@models.command()
def fetch(
    model: Annotated[str, typer.Argument(help="As for `kvrelay serve`.")] = DEFAULT_MODEL,
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a model and convert it, so that serving it starts at once."""
    from engine.weights import ModelStore
    from kvrelay.progress import ProgressBars

    with ProgressBars(Console(stderr=True)) as progress:
        files = ModelStore(_cache_dir(cache_dir)).resolve(model, progress=progress)
    typer.echo(files.directory)


def _cache_dir(given: Path | None) -> Path:
    if given is None:
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "kvrelay"
    path = Path(os.path.expanduser(given))  # Path's own raises for a user who does not exist
    if path.exists() and not path.is_dir():
        raise ConfigError("cache-dir", f"{path} is not a directory")
    return path


def _set_up_logging(level: str) -> None:
    names = ("debug", "info", "warning", "error")
    if level.lower() not in names:
        raise ConfigError("log-level", f"must be one of {', '.join(names)}, not {level!r}")
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def main() -> None:
    """The `kvrelay` command."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:  # options that cannot be parsed
        _fail(error.format_message())
    except ConfigError as error:
        option = _OPTIONS.get(error.field, error.field.replace("_", "-"))
        _fail(f"--{option}: {error.problem}" if option in _option_names() else str(error))
    except KvrelayError as error:
        _fail(str(error))


# Settings whose option has another name.
_OPTIONS = {"api_keys": "api-key"}


def _option_names() -> frozenset[str]:
    command = typer.main.get_command(app)
    names = {p.name for c in getattr(command, "commands", {}).values() for p in c.params}
    return frozenset(str(name).replace("_", "-") for name in names)


def _fail(message: str) -> None:
    """One line, and the status of a wrong command. Without a message, help has been printed."""
    if message:
        line = escape(" ".join(message.split()))
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/bold red] {line}")
    sys.exit(2)
