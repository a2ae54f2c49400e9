"""A tiny model, in memory once, and what verifies it."""

from __future__ import annotations

from functools import partial

import pytest

from cluster import LocalConfig, RunnerFactory
from cluster.exactness import ExactnessConfig, MakeCompute
from cluster.torch_compute import TorchModel, torch_compute
from engine.kernels import CompiledKernels, KernelsUnavailable
from engine.weights import ModelFiles, ModelStore
from tests.cluster.exactness.taken_ways import Verify, take_all
from tests.engine.tiny import tiny_model_dir


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    try:
        CompiledKernels(batch_invariant=True)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("exactness")
    return ModelStore(folder).resolve(str(tiny_model_dir(folder / "tiny-llama")))


@pytest.fixture(scope="session")
def loaded(files: ModelFiles) -> TorchModel:
    return TorchModel.load(files, ExactnessConfig().invariant_engine)


@pytest.fixture
def make_compute(files: ModelFiles, loaded: TorchModel) -> MakeCompute:
    def make(config: LocalConfig) -> RunnerFactory:
        return torch_compute(files, config, loaded)

    return make


@pytest.fixture
def verify(files: ModelFiles, make_compute: MakeCompute) -> Verify:
    return partial(take_all, files, make_compute=make_compute)
