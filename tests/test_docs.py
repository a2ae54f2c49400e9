"""What the documentation names must be there."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gateway.cluster_view import cluster
from protocol import Role
from scheduler import CacheConfig, SchedulerConfig
from telemetry import Metrics
from tests.telemetry.cluster_status import NodeSketch, cluster_status

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCHEDULER_PAGE = (ROOT / "docs" / "scheduler.md").read_text(encoding="utf-8")

_TEST = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
_FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|yaml|md|json|toml))`")
_LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]+)?\)")
_METRIC = re.compile(r"`(?:rate\()?(kvrelay_\w+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in _FILE.findall(text):
        assert (ROOT / name).exists(), name
    for name in _LINK.findall(text):
        assert (page.parent / name).exists(), name
    for name, test in _TEST.findall(text):
        assert test in _tests_in(ROOT / name), f"{name}::{test}"


def _tests_in(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {
            prefix + test.name
            for test in inner
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef)
        }
    return names


@pytest.mark.parametrize(
    "knob", sorted({field.name for cls in (SchedulerConfig, CacheConfig) for field in fields(cls)})
)
def test_each_knob_is_described(knob: str) -> None:
    assert f"`{knob}`" in SCHEDULER_PAGE


def test_each_metric_is_exported() -> None:
    status = cluster_status(NodeSketch("p", Role.PREFILL))
    metrics = Metrics()
    exported = metrics.exposition(status).decode()
    named = set(_METRIC.findall(SCHEDULER_PAGE))
    assert len(named) > 8
    assert named <= set(re.findall(r"^# TYPE (\w+) ", exported, re.MULTILINE))


def test_each_field_of_the_cluster_is_there() -> None:
    node = cluster(cluster_status(NodeSketch("p", Role.PREFILL)))["nodes"][0]
    known = set(node) | {
        f"{name}.{key}" for name, value in node.items() if isinstance(value, dict) for key in value
    }
    named = set(re.findall(r"`([\w.]+)`", "".join(_last_cells("`/cluster`, of each node"))))
    assert len(named) > 8
    assert named <= known


def _last_cells(heading: str) -> list[str]:
    """The last column of the table of the scheduler's page whose last heading this is."""
    _, _, rest = SCHEDULER_PAGE.partition(f"| {heading} |\n|---|---|---|\n")
    return [line.rsplit(" | ", 1)[1] for line in rest.partition("\n\n")[0].splitlines()]
