"""A connector of a user's own that only writes down what it was made with."""

from __future__ import annotations

from pathlib import Path

from kv_transfer import BaseConnector, ConnectorContext
from protocol import ConfigError


class ToldConnector(BaseConnector):
    """Keeps a file for its node in the directory that is its only option."""

    def __init__(self, context: ConnectorContext) -> None:
        if set(context.options) != {"directory"}:
            raise ConfigError("connectors", "ToldConnector needs a directory")
        self._file = Path(str(context.options["directory"])) / context.node_id
        self._told = f"{context.role} {context.block_size} {context.fingerprint}"

    def shutdown(self) -> None:
        self._file.write_text(self._told)
