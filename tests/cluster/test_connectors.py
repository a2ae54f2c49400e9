"""Connectors of a user's own, named in the configuration, beside the hand-off."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cluster import ConnectorSpec, LocalCluster, LocalConfig, TransferConfig
from protocol import ConfigError, SamplingParams
from tests.hash_compute import hash_compute
from tests.hash_model import expected_tokens, hash_files, prompt_of
from tests.process_cluster import generate, process_config, running

TOLD = "tests.told_connector:ToldConnector"


def with_connectors(*specs: ConnectorSpec) -> LocalConfig:
    return dataclasses.replace(process_config(), transfer=TransferConfig(connectors=specs))


async def test_each_node_has_its_own(tmp_path: Path) -> None:
    config = with_connectors(ConnectorSpec(path=TOLD, options={"directory": str(tmp_path)}))
    sampling = SamplingParams(max_tokens=5)
    async with running(config) as cluster:
        assert await generate(cluster, prompt_of(40), sampling) == expected_tokens(
            prompt_of(40), sampling
        )
    assert texts_in(tmp_path) == {
        "prefill-0": "prefill 16 hash",
        "decode-0": "decode 16 hash",
    }


def texts_in(directory: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in directory.iterdir()}


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (ConnectorSpec(path="nowhere:Connector"), "nowhere:Connector: there is no module"),
        (ConnectorSpec(path="no colon"), "no colon: must have the form module:Class"),
        (ConnectorSpec(path="pathlib:Path"), "is no connector"),
        (ConnectorSpec(path=TOLD), "ToldConnector needs a directory"),
    ],
    ids=["no module", "no name", "no connector", "wrong options"],
)
async def test_one_that_cannot_be_made(spec: ConnectorSpec, problem: str) -> None:
    config = dataclasses.replace(with_connectors(spec), processes=False)
    with pytest.raises(ConfigError, match=problem) as caught:
        LocalCluster(config, hash_files(), hash_compute(hash_files(), config))
    assert caught.value.field == "connectors"
