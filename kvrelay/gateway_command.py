"""`kvrelay gateway`: one more gateway of a cluster that runs, on any machine, without Ray."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from cluster.connect_directory import start_directory
from cluster.directory_config import DirectoryAddress
from cluster.http_server import bind, served_model, url_of
from cluster.joined_cluster import JoinedCluster
from cluster.secret import Secret
from cluster.server import serve
from gateway import GatewayConfig
from kv_transfer.peering import ClusterToken
from kvrelay.cluster_control import check_installed
from kvrelay.cluster_options import CLUSTER_TOKEN
from kvrelay.deployment import Deployment
from kvrelay.serve_command import resolve_model
from kvrelay.stop_signals import ignore_stop_signals
from protocol import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatewayCommand:
    """All that the user asked for."""

    deployment: Deployment
    api_keys: tuple[str, ...] = field(repr=False)
    cache_dir: Path
    console: Console
    token: str | None = field(repr=False)
    directory_password: str | None = field(repr=False)

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            ConfigError: a setting is missing or wrong, or the directory is not there.
            ModelError: the model is unknown or broken.
        """
        began = time.monotonic()
        check_installed()
        token = self._token()
        with self.deployment.blaming():
            settings = self.deployment.settings
            local, serve_config = settings.local_config(), settings.serve_config(self.cache_dir)
            directory, url = settings.directory.directory_config(), settings.directory.url
            if url is None:
                raise ConfigError(
                    "directory.url", "is where a gateway finds the nodes, and has to be given"
                )
            with bind(serve_config) as listener:
                files = resolve_model(serve_config, self.console)
                password = self.directory_password
                address = DirectoryAddress(url, None if password is None else Secret(password))
                cluster = JoinedCluster(
                    partial(start_directory, directory, settings.name, address, need_server=True),
                    local.fingerprint(files),
                    ClusterToken(token),
                    local.routing,
                )

                def on_ready() -> None:
                    self.console.print(
                        f"[bold green]ready[/bold green]    "
                        f"{url_of(serve_config.host, listener.getsockname()[1])}   "
                        f"({len(cluster.dispatcher.node_ids)} nodes, after "
                        f"{time.monotonic() - began:.1f} s; Ctrl-C stops)",
                        soft_wrap=True,
                    )

                model = served_model(files, local)
                keys = GatewayConfig(api_keys=self.api_keys)
                asyncio.run(serve(cluster, model, listener, keys, on_ready))
                ignore_stop_signals()
        self.console.print("stopped")

    def _token(self) -> str:
        if self.token is None:
            raise ConfigError(CLUSTER_TOKEN, "is how a gateway proves itself, and has to be set")
        return self.token
