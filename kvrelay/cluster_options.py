"""What the commands for clusters on Ray ask for: which cluster, and where that is remembered."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
import yaml

from protocol import ConfigError, Role

DEFAULT_NAME = "kvrelay"
CLUSTER_TOKEN = "KVRELAY_CLUSTER_TOKEN"
MIN_TOKEN_CHARACTERS = 16

Name = Annotated[
    str | None,
    typer.Option(help="Of the cluster, as its file has it.", show_default="the only one there is"),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Of the Ray cluster that it runs on, if it was not started from here: host:port.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        envvar="KVRELAY_STATE_DIR",
        help="Where it is remembered which clusters run.",
        show_default="~/.local/state/kvrelay",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
DrainSeconds = Annotated[
    float | None,
    typer.Option(
        "--drain",
        min=0,
        help="Seconds for the requests of a node that stops; then they go on elsewhere.",
        show_default="30",
    ),
]


def state_dir_of(given: Path | None) -> Path:
    """The directory that was asked for, or that of the user."""
    if given is not None:
        return Path(os.path.expanduser(given))
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvrelay"


def name_of(given: str | None, state_dir: Path) -> str:
    """The cluster that is meant.

    Raises:
        ConfigError: several run, and none was named.
    """
    if given is not None:
        return given
    known = sorted(path.stem for path in state_dir.glob("*.json"))
    if len(known) > 1:
        raise ConfigError("name", f"several clusters are known here: {', '.join(known)}; name one")
    return known[0] if known else DEFAULT_NAME


def parse_settings(given: Iterable[str]) -> dict[str, object]:
    """`place=value` each, with values as YAML has them.

    Raises:
        ConfigError: one is something else.
    """
    settings: dict[str, object] = {}
    for text in given:
        place, equals, value = text.partition("=")
        if not equals or not place:
            raise ConfigError("set", f"must be like prefill.count=4, not {text!r}")
        try:
            settings[place.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError("set", f"{place}: {value!r} is no value of YAML") from error
    return settings


def parse_targets(given: Iterable[str]) -> dict[Role, int]:
    """`role=number` each.

    Raises:
        ConfigError: one is something else, or a role comes twice.
    """
    targets: dict[Role, int] = {}
    for text in given:
        role, _, number = text.partition("=")
        if role not in list(Role) or not number.isdecimal():
            raise ConfigError("scale", f"must be like prefill=4 decode=2, not {text!r}")
        if Role(role) in targets:
            raise ConfigError("scale", f"{role} is given twice")
        targets[Role(role)] = int(number)
    return targets


def parse_role(given: str) -> Role:
    """Raises ConfigError: there is no such role."""
    if given not in list(Role):
        raise ConfigError("role", f"must be one of {', '.join(Role)}, not {given!r}")
    return Role(given)


def take_secret(variable: str, least_characters: int = 1) -> str | None:
    """What was set, if anything. Processes that are started from here on do not see it there.

    Raises:
        ConfigError: it is so short that it could be guessed.
    """
    secret = os.environ.pop(variable, None)
    if secret is not None and len(secret) < least_characters:
        raise ConfigError(
            variable, f"must have at least {least_characters} characters, or be unset"
        )
    return secret
