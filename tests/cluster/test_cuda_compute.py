"""Nodes on a GPU: without one, the setting is named before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from cluster import LocalConfig
from cluster.cuda_compute import cuda_compute
from engine import EngineConfig
from protocol import ConfigError
from tests.hash_model import hash_files


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_that_is_said() -> None:
    config = LocalConfig(max_model_len=64, engine=EngineConfig(device="cuda:0"))
    with pytest.raises(ConfigError, match="has no CUDA") as caught:
        cuda_compute(hash_files(), config)
    assert caught.value.field == "device"
