"""`kvrelay serve`: from a model's name to a server that answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from cluster import LocalConfig, ServeConfig
from cluster.http_server import bind, served_model, url_of
from cluster.server import Cluster, make_cluster, serve
from cluster.sizes import format_size
from engine.weights import ModelFiles, ModelStore
from gateway import GatewayConfig
from kvrelay.progress import ProgressBars
from kvrelay.stop_signals import ignore_stop_signals


@dataclass(frozen=True)
class ServeCommand:
    """All that the user asked for, valid on its own."""

    serve: ServeConfig
    local: LocalConfig
    gateway: GatewayConfig
    console: Console
    cluster_token: str | None = field(default=None, repr=False)

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            ConfigError: a setting does not go with this machine or this model.
            ModelError: the model is unknown or broken.
            NodeLost: the process of a node did not start.
        """
        began = time.monotonic()
        with bind(self.serve) as listener:
            port = listener.getsockname()[1]
            files = resolve_model(self.serve, self.console)
            self.console.print(f"[bold]model[/bold]    {_describe_model(files)}")
            model = served_model(files, self.local)
            cluster = make_cluster(files, self.local, self.cluster_token)

            def on_ready() -> None:
                self.console.print(_node_table(cluster))
                took = time.monotonic() - began
                self.console.print(
                    f"[bold green]ready[/bold green]    {url_of(self.serve.host, port)}"
                    f"   (after {took:.1f} s; Ctrl-C stops)",
                    soft_wrap=True,
                )

            asyncio.run(serve(cluster, model, listener, self.gateway, on_ready))
            ignore_stop_signals()
        self.console.print("stopped")


def resolve_model(config: ServeConfig, console: Console) -> ModelFiles:
    """Find the model; fetch and convert it if that was never done."""
    with ProgressBars(console) as progress:
        return ModelStore(config.cache_dir).resolve(config.model, progress=progress)


def _describe_model(files: ModelFiles) -> str:
    model = files.config
    return (
        f"{files.name}: {model.num_layers} layers, {model.num_attention_heads} heads, "
        f"{model.num_kv_heads} KV heads, float32"
    )


_NODE_COLUMNS = (
    *("node", "role", "KV blocks", "KV tokens", "KV memory"),
    *("seats", "step", "longest"),  # requests, tokens, tokens
)


def _node_table(cluster: Cluster) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _NODE_COLUMNS:
        table.add_column(column, justify="left" if column in ("node", "role") else "right")
    for node in cluster.nodes:
        info = node.info
        pool = cluster.config.kv_cache(cluster.files.config, info.role)
        table.add_row(
            info.node_id,
            info.role,
            f"{info.num_blocks} x {info.block_size}",
            str(info.num_blocks * info.block_size),
            format_size(info.num_blocks * pool.bytes_per_block),
            str(info.max_num_seqs),
            str(info.max_num_batched_tokens),
            str(info.max_model_len),
        )
    return table
