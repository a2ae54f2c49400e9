"""docs/deploy.md says what the files in deploy/ do."""

from __future__ import annotations

import re

from tests.deploy.deployments import ROOT, launcher, ray_cluster_groups

_PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
_PINNED = re.compile(r"--((?:node-manager|object-manager|runtime-env-agent|\w+-worker)-port)=(\d+)")


def test_ports_are_those_of_the_files() -> None:
    told = set(_PINNED.findall(_PAGE))
    assert len(told) == 5
    commands = launcher("on-premises")["worker_start_ray_commands"]
    assert told == set(_PINNED.findall(" ".join(commands)))
    for group in ray_cluster_groups().values():
        assert dict(told).items() <= group["rayStartParams"].items()
    for port in {number for _, number in told}:
        assert f"| {port}" in _PAGE or f"–{port} |" in _PAGE, port


def test_what_is_installed_is_what_the_launcher_installs() -> None:
    pins = re.compile(r"(?:torch|ray)==[\d.]+")
    installed = set(pins.findall(" ".join(launcher("on-premises")["setup_commands"])))
    assert set(pins.findall(_PAGE)) == installed


def test_keys_of_the_secret_are_told() -> None:
    told = set(re.findall(r"--from-literal=([\w-]+)=", _PAGE))
    assert told == {"ray-auth-token", "cluster-token", "api-key", "directory-password"}
