"""What computes, in each way that there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.kernels import CompiledKernels, Kernels, KernelsUnavailable, TorchKernels
from tests.engine.kernels.guarded import threads


def compiled_kernels(*, batch_invariant: bool = False) -> CompiledKernels:
    try:
        return CompiledKernels(batch_invariant=batch_invariant)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=["torch", "compiled", "compiled, batch-invariant"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "torch":
        return TorchKernels()
    return compiled_kernels(batch_invariant="invariant" in request.param)


@pytest.fixture(scope="session")
def invariant() -> CompiledKernels:
    return compiled_kernels(batch_invariant=True)


@pytest.fixture(scope="session")
def usual() -> CompiledKernels:
    return compiled_kernels()


@pytest.fixture(scope="session", params=["usual", "batch-invariant"])
def both(request: pytest.FixtureRequest) -> CompiledKernels:
    return compiled_kernels(batch_invariant=request.param == "batch-invariant")


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param
