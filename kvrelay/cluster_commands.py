"""`kvrelay up` and what goes with it: clusters on Ray."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cluster_options import (
    CLUSTER_TOKEN,
    MIN_TOKEN_CHARACTERS,
    Address,
    DrainSeconds,
    Json,
    Name,
    StateDir,
    name_of,
    parse_role,
    parse_settings,
    parse_targets,
    state_dir_of,
    take_secret,
)
from kvrelay.console import make_console
from kvrelay.model_options import CacheDir, cache_dir_of
from kvrelay.serve_options import set_up_logging
from kvrelay.stop_signals import end_on_stop_signals

if TYPE_CHECKING:
    from kvrelay.cluster_control import ClusterControl

_DIRECTORY_PASSWORD = "KVRELAY_DIRECTORY_PASSWORD"


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting by its place in the file, e.g. prefill.count=4; it wins. May be given more "
        "than once.",
    ),
]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        envvar="KVRELAY_API_KEY",
        help="Accept only requests with one of these keys (all but /health and /metrics).",
        show_default="no key is asked for",
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


def up(
    file: Annotated[Path, typer.Argument(help="What to deploy.")] = Path("cluster.yaml"),
    settings: Settings = None,
    foreground: Annotated[
        bool, typer.Option(help="Stay, show what happens, and end the cluster with Ctrl-C.")
    ] = False,
    api_key: ApiKeys = None,
    cache_dir: CacheDir = None,
    state_dir: StateDir = None,
    log_level: LogLevel = "warning",
) -> None:
    """Start a cluster on Ray, and return when it serves."""
    set_up_logging(log_level)
    token = take_secret(CLUSTER_TOKEN, MIN_TOKEN_CHARACTERS)
    password = take_secret(_DIRECTORY_PASSWORD)
    from kvrelay.deployment import Deployment
    from kvrelay.up_command import UpCommand

    deployment = Deployment.read(file, {}, parse_settings(settings or ()))
    UpCommand(
        deployment=deployment,
        api_keys=tuple(api_key or ()),
        cache_dir=cache_dir_of(cache_dir),
        state_dir=state_dir_of(state_dir),
        console=make_console(),
        foreground=foreground,
        token=token,
        directory_password=password,
    ).run()


def gateway(
    file: Annotated[Path, typer.Argument(help="That of the cluster.")] = Path("cluster.yaml"),
    settings: Settings = None,
    api_key: ApiKeys = None,
    cache_dir: CacheDir = None,
    log_level: LogLevel = "warning",
) -> None:
    """Run one more gateway of a cluster with a directory of its own, on any machine.

    It needs the cluster's token in KVRELAY_CLUSTER_TOKEN, and no Ray.
    """
    set_up_logging(log_level)
    end_on_stop_signals(status=0)
    token = take_secret(CLUSTER_TOKEN, MIN_TOKEN_CHARACTERS)
    password = take_secret(_DIRECTORY_PASSWORD)
    from kvrelay.deployment import Deployment
    from kvrelay.gateway_command import GatewayCommand

    GatewayCommand(
        deployment=Deployment.read(file, {}, parse_settings(settings or ())),
        api_keys=tuple(api_key or ()),
        cache_dir=cache_dir_of(cache_dir),
        console=make_console(),
        token=token,
        directory_password=password,
    ).run()


def down(name: Name = None, address: Address = None, state_dir: StateDir = None) -> None:
    """End a cluster on Ray, with everything that it has started."""
    _control(name, address, state_dir).down()


def status(
    name: Name = None, address: Address = None, state_dir: StateDir = None, json: Json = False
) -> None:
    """Show what runs in a cluster on Ray, and how it does."""
    _control(name, address, state_dir).status(json=json)


def scale(
    targets: Annotated[list[str], typer.Argument(help="Numbers of nodes: prefill=4 decode=2.")],
    name: Name = None,
    address: Address = None,
    state_dir: StateDir = None,
    drain_s: DrainSeconds = None,
) -> None:
    """Have so many nodes of these roles; no request is lost."""
    _control(name, address, state_dir).scale(parse_targets(targets), drain_s)


def drain(
    node: Annotated[str, typer.Argument(help="As `kvrelay status` shows it.")],
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            help="Seconds; then the requests that are left go on elsewhere.",
            show_default="none: wait for all",
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    name: Name = None,
    address: Address = None,
    state_dir: StateDir = None,
) -> None:
    """Give a node no more requests, and return when it has none."""
    _control(name, address, state_dir).drain(node, timeout_s, undo=undo)


def restart(
    members: Annotated[
        list[str] | None, typer.Argument(help="Nodes or gateways; none: all of them.")
    ] = None,
    rolling: Annotated[bool, typer.Option(help="One after the other.")] = False,
    name: Name = None,
    address: Address = None,
    state_dir: StateDir = None,
) -> None:
    """Replace processes of a cluster by new ones. With --rolling, no request is lost."""
    _control(name, address, state_dir).restart(tuple(members or ()), rolling=rolling)


def role(
    node: Annotated[str, typer.Argument(help="As `kvrelay status` shows it.")],
    new_role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or unified.")],
    name: Name = None,
    address: Address = None,
    state_dir: StateDir = None,
    drain_s: DrainSeconds = None,
) -> None:
    """Give a node another role. It keeps what it has cached."""
    _control(name, address, state_dir).change_role(node, parse_role(new_role), drain_s)


def _control(name: str | None, address: str | None, state_dir: Path | None) -> ClusterControl:
    from kvrelay.cluster_control import ClusterControl

    directory = state_dir_of(state_dir)
    return ClusterControl(name_of(name, directory), address, directory, make_console())


COMMANDS = (up, down, status, scale, drain, restart, role, gateway)
