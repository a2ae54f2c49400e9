"""The command line. Thin: options in, settings out; errors become one line and an exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from kvrelay import __version__
from kvrelay.cluster_commands import COMMANDS as CLUSTER_COMMANDS
from kvrelay.model_options import DEFAULT_MODEL, CacheDir, cache_dir_of
from kvrelay.serve_options import serve
from kvrelay.verify_options import verify
from protocol import ConfigError, KvrelayError
from scheduler.scenario_player import DEFAULT_MAX_STEPS

app = typer.Typer(
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut the names of options off in a narrow terminal
)
models = typer.Typer(
    invoke_without_command=True, rich_markup_mode=None, help="Find, fetch and convert models."
)
app.command()(serve)
app.command()(verify)
for command in CLUSTER_COMMANDS:
    app.command()(command)
app.add_typer(models, name="models")


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
def schedule(
    file: Annotated[Path, typer.Argument(help="A scenario; examples/schedules has some.")],
    html: Annotated[Path | None, typer.Option(help="Write the timeline to this page, too.")] = None,
    steps: Annotated[
        int, typer.Option(min=1, max=100_000, help="Stop after so many steps.")
    ] = DEFAULT_MAX_STEPS,
) -> None:
    """Show step by step what the scheduler decides for a small scenario, without a model."""
    from kvrelay.console import make_console
    from kvrelay.schedule_command import ScheduleCommand

    ScheduleCommand(file, html, steps, make_console()).run()


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
        files = ModelStore(cache_dir_of(cache_dir)).resolve(model, progress=progress)
    typer.echo(files.directory)


def main() -> None:
    """The `kvrelay` command."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:  # options that cannot be parsed
        _fail(error.format_message())
    except ConfigError as error:
        option = _OPTIONS.get(error.field, error.field.replace("_", "-"))
        if option in _option_names():
            _fail(f"--{option}: {error.problem}")
        _fail(*str(error).split("\n"))  # a file can have several mistakes
    except KvrelayError as error:
        _fail(str(error))


# Settings whose option has another name.
_OPTIONS = {"api_keys": "api-key"}


def _option_names() -> frozenset[str]:
    command = typer.main.get_command(app)
    names = {p.name for c in getattr(command, "commands", {}).values() for p in c.params}
    return frozenset(str(name).replace("_", "-") for name in names)


def _fail(*messages: str) -> NoReturn:
    """A line each, and the status of a wrong command. An empty one: help has been printed."""
    console = Console(stderr=True, soft_wrap=True)
    for message in filter(None, messages):
        words = escape(" ".join(message.split()))
        console.print(f"[bold red]error:[/bold red] {words}", emoji=False)
    sys.exit(2)
