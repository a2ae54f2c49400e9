"""What every host has to have in common, looked at before anything is placed on one."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_mode.hosts import Host
from cluster.ray_mode.local_ray import RayFailed
from cluster.ray_mode.places import living_hosts
from cluster.ray_mode.spec import Failed, HostReport, Spec, pack, unpack, unpack_or_raise
from engine.weights import ModelStore
from protocol import ConfigError, KvrelayError, ModelError

logger = logging.getLogger(__name__)

_PACKAGES = ("kvrelay", "torch", "ray")
_TIMEOUT_S = 120.0  # a host may have to fetch and convert the model


def check_hosts(spec: Spec, hosts: Sequence[Host]) -> None:
    """Ask all hosts at once. One that leaves Ray meanwhile does not matter.

    Raises:
        RayFailed: a host has another version of something than we have, or does not answer.
        ModelError: a host does not find the model, or another one.
    """
    check = ray.remote(report_host)
    data = pack(spec)
    asked = [
        check.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host.host_id, soft=False),
        ).remote(data, host.address)
        for host in hosts
    ]
    own = versions()
    for host, answer in zip(hosts, asked, strict=True):
        report = _answer_of(host, answer)
        if report is None:
            logger.warning("%s has just left Ray", host.address)
            continue
        _compare(host, own, report.versions)
        if report.fingerprint != spec.fingerprint:
            raise ModelError(
                f"{host.address} has another model under the name {spec.serve.model}: its "
                f"fingerprint is {report.fingerprint}, here it is {spec.fingerprint}",
                path=spec.serve.model,
            )


def report_host(spec: bytes, address: str) -> bytes:
    """Runs on the host; HostReport or Failed."""
    told = unpack(spec)
    assert isinstance(told, Spec), told
    try:
        files = ModelStore(Path(told.serve.cache_dir)).resolve(told.serve.model)
    except KvrelayError as error:
        return pack(Failed.of(error))
    return pack(
        HostReport(
            address=address,
            versions=versions(),
            fingerprint=files.fingerprint,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            pid=os.getpid(),
        )
    )


def versions() -> dict[str, str]:
    """Of what has to be the same everywhere."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def _answer_of(host: Host, answer: object) -> HostReport | None:
    """None: the host is there no more."""
    try:
        report = unpack_or_raise(ray.get(answer, timeout=_TIMEOUT_S))
    except GetTimeoutError as error:
        raise RayFailed(f"{host.address} has not answered within {_TIMEOUT_S:g} s") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ModuleNotFoundError):
            raise RayFailed(
                f"{host.address} has no module {cause.name}: install the same kvrelay there"
            ) from error
        raise RayFailed(f"{host.address} could not be looked at: {cause!r}") from error
    except RayError as error:
        if host.host_id not in {living.host_id for living in living_hosts()}:
            return None
        first = str(error).strip().partition("\n")[0]
        raise RayFailed(f"{host.address} could not be looked at: {first}") from error
    except ModelError as error:
        raise ModelError(f"on {host.address}: {error}", path=error.path) from error
    assert isinstance(report, HostReport), report
    return report


def _compare(host: Host, own: dict[str, str], theirs: dict[str, str]) -> None:
    for name, version in own.items():
        if theirs.get(name) != version:
            raise RayFailed(
                f"{host.address} has {name} {theirs.get(name, 'none')}, here it is {version}: all "
                "hosts have to have the same"
            )


def check_bind(spec: Spec, hosts: Sequence[Host]) -> None:
    """Raises ConfigError: nodes of different hosts could not reach each other."""
    if len(hosts) > 1 and not spec.config.transfer.listens_outside:
        raise ConfigError(
            "transfer.bind",
            f"is {spec.config.transfer.bind}, where other hosts cannot reach a node, and Ray has "
            f"{len(hosts)} hosts: set it to auto or to their network, such as 10.0.0.0/8",
        )
