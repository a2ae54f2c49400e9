"""What every command that needs a model asks for: which one, and where models are kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from protocol import ConfigError

DEFAULT_MODEL = "smollm2-135m"

CacheDir = Annotated[
    Path | None,
    typer.Option(
        envvar="KVRELAY_CACHE_DIR",
        help="Where fetched and converted models are kept.",
        show_default="~/.cache/kvrelay",
    ),
]


def cache_dir_of(given: Path | None) -> Path:
    """The directory that was asked for, or that of the user.

    Raises:
        ConfigError: there is something else than a directory.
    """
    if given is None:
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "kvrelay"
    path = Path(os.path.expanduser(given))  # Path's own raises for a user who does not exist
    if path.exists() and not path.is_dir():
        raise ConfigError("cache-dir", f"{path} is not a directory")
    return path
