"""`kvrelay up`: from a file to a cluster on Ray that answers."""

from __future__ import annotations

import logging
import secrets
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from cluster import LocalConfig
from cluster.autoscaling_config import AutoscalingConfig
from cluster.file import ClusterFile
from cluster.http_server import served_model
from cluster.processes import TORCH_COMPUTE
from cluster.ray_config import check_name
from cluster.ray_mode.ray_cluster import RayCluster
from cluster.ray_mode.spec import Spec
from cluster.secret import Secret
from engine.weights import ModelFiles
from gateway import GatewayConfig
from kvrelay.cluster_control import ClusterControl, check_installed
from kvrelay.deployment import Deployment
from kvrelay.serve_command import resolve_model

_ADMISSION_WAIT_S = 30.0  # for a node that is being replaced, before a request is refused


@dataclass(frozen=True, kw_only=True)
class UpCommand:
    """All that the user asked for."""

    deployment: Deployment
    api_keys: tuple[str, ...] = field(repr=False)
    cache_dir: Path
    state_dir: Path
    console: Console
    foreground: bool
    token: str | None = field(repr=False)
    directory_password: str | None = field(repr=False)

    def run(self) -> None:
        """Return when the cluster serves; in the foreground, when it has been ended.

        Raises:
            ConfigError, ModelError, NoPlace, RayFailed, NodeLost: what keeps it from that.
        """
        began = time.monotonic()
        check_installed()
        with self.deployment.blaming():
            local = _as_processes(self.deployment.settings).local_config()
            serve = self.deployment.settings.serve_config(self.cache_dir)
            files = resolve_model(serve, self.console)
            spec = self._spec(local, files)
            _check_fits(local, files)
            cluster = RayCluster.up(spec, self.state_dir, self._tell)
        control = ClusterControl(spec.name, None, self.state_dir, self.console)
        report = cluster.report()
        control.show(report)
        urls = ", ".join(member.url for member in report.members if member.kind == "gateway")
        took = time.monotonic() - began
        ends = "Ctrl-C ends it" if self.foreground else f"{_down(spec.name)} ends it"
        self.console.print(
            f"[bold green]ready[/bold green]    {urls or 'without a gateway'}   "
            f"(after {took:.1f} s; {ends})",
            soft_wrap=True,
        )
        if self.foreground:
            control.follow(cluster)
        else:
            cluster.close()

    def _spec(self, local: LocalConfig, files: ModelFiles) -> Spec:
        settings = self.deployment.settings
        check_name(settings.name)
        served_model(
            files, local
        )  # what is wrong with its tokenizer is told before anything starts
        router = replace(local.router, admission_wait_s=_ADMISSION_WAIT_S)
        return Spec(
            name=settings.name,
            config=replace(local, router=router),
            serve=settings.serve_config(self.cache_dir),
            fingerprint=files.fingerprint,
            ray=settings.ray.ray_config(),
            resources=settings.resources(),
            gateways=settings.gateway.gateway_replicas(),
            gateway=GatewayConfig(api_keys=self.api_keys),
            directory=settings.directory.directory_config(),
            directory_password=_secret(self.directory_password),
            autoscaling=self._autoscaling(),
            token=Secret(self.token or secrets.token_hex(32)),
            compute=TORCH_COMPUTE,
            module_path=tuple(sys.path),
            log_level=logging.getLogger().getEffectiveLevel(),
        )

    def _autoscaling(self) -> AutoscalingConfig:
        return self.deployment.settings.autoscaling.autoscaling_config()

    def _tell(self, stage: str) -> None:
        self.console.print(f"[dim]{stage}[/dim]")


def _as_processes(settings: ClusterFile) -> ClusterFile:
    """Every node on Ray has a process of its own, whatever the file says of `kvrelay serve`."""
    return settings.model_copy(update={"processes": True})


def _check_fits(local: LocalConfig, files: ModelFiles) -> None:
    """Raises ConfigError: a pool or a knob does not go with the longest request of this model."""
    for role in local.num_nodes:
        pool = local.kv_cache(files.config, role)
        local.scheduler_config(role, files.config, pool.num_blocks - 1)


def _secret(text: str | None) -> Secret | None:
    return None if text is None else Secret(text)


def _down(name: str) -> str:
    return "`kvrelay down`" if name == "kvrelay" else f"`kvrelay down --name {name}`"
