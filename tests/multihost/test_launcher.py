"""`kvrelay up deploy/on-premises.yaml`, as somebody types it on the head of hosts that have ssh."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine.weights.tiny_models import write_hf_directory
from tests.multihost.host_network import HostNetwork
from tests.multihost.launched_hosts import (
    DECODE,
    HEAD,
    PREFILL,
    LaunchedHosts,
    missing_for_ssh,
)

pytestmark = [pytest.mark.multihost, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def launched(needs_ray: None, needs_nixl: None) -> Iterator[LaunchedHosts]:
    if why := missing_for_ssh():
        pytest.skip(why)
    folder = tempfile.TemporaryDirectory(prefix="kvr", dir="/var/tmp", ignore_cleanup_errors=True)
    with folder as name:
        shared = Path(name)
        network = HostNetwork((HEAD, PREFILL, DECODE), shared)
        with network, LaunchedHosts(network, shared) as hosts:
            hosts.write_file(write_hf_directory(shared / "tiny"))
            yield hosts


def test_from_nothing_to_an_answer_and_back(launched: LaunchedHosts) -> None:
    launched.check_on_head("mkdir -p -m 700 ~/.ray; ray get-auth-token --generate > /dev/null")
    launched.check_on_head(f"kvrelay up {launched.file}")
    rows = launched.check_on_head("kvrelay status").splitlines()
    homes = {words[0]: words[3] for words in map(str.split, rows) if words[2:3] == ["ready"]}
    head = launched.address(HEAD)
    assert homes == {
        "directory": head,
        "gateway-0": head,
        "prefill-0": launched.address(PREFILL),
        "decode-0": launched.address(DECODE),
    }
    asked = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
    answer = httpx.post(f"http://{head}:8000/v1/completions", json=asked, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 4
    again = launched.on_head(f"kvrelay up {launched.file}")
    assert "runs; choose another name" in again.stderr  # else the launcher would end what runs
    launched.check_on_head("kvrelay down")
    assert launched.processes_of_ray()[HEAD] == []
    assert "no cluster" in launched.on_head("kvrelay status").stderr
