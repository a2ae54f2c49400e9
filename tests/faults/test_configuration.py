"""A plan in cluster.yaml is what the transports of all nodes get."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.file import ClusterFile
from cluster.yaml_file import load_yaml
from kv_transfer import Fault, FaultKind, FaultPlan
from protocol import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_it_is_read(path: Path) -> None:
    path.write_text(
        "transfer:\n  faults:\n    seed: 7\n    bytes_per_s: 1.0e+8\n    faults:\n"
        "      - {kind: drop, of: [commit], probability: 0.05}\n"
        "      - {kind: stall, seconds: 3, node: prefill-0, times: 2}\n"
    )
    assert load_yaml(path, ClusterFile).local_config().transfer.faults == FaultPlan(
        seed=7,
        bytes_per_s=1e8,
        faults=(
            Fault(kind=FaultKind.DROP, of=("commit",), probability=0.05),
            Fault(kind=FaultKind.STALL, seconds=3, node="prefill-0", times=2),
        ),
    )


def test_nothing_goes_wrong_unless_asked_for(path: Path) -> None:
    path.write_text("transfer: {faults: null}\n")
    assert load_yaml(path, ClusterFile).local_config().transfer.faults is None


def test_a_wrong_one_names_its_place(path: Path) -> None:
    path.write_text("transfer: {faults: {faults: [{kind: drop, of: [write]}]}}\n")
    with pytest.raises(ConfigError, match=r"transfer\.faults: of: drop can befall"):
        load_yaml(path, ClusterFile).local_config()
