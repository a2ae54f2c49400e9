"""Which kernels a CPU computes with."""

from __future__ import annotations

import logging

from engine.engine_config import EngineConfig, KernelsChoice
from engine.kernels.build import KernelsUnavailable
from engine.kernels.compiled_kernels import CompiledKernels
from engine.kernels.kernels import Kernels
from engine.kernels.torch_kernels import TorchKernels
from protocol import ConfigError

logger = logging.getLogger(__name__)


def choose_kernels(config: EngineConfig) -> Kernels:
    """The compiled ones if they can be had, built now if they never were.

    Raises ConfigError: they are needed and cannot be had.
    """
    if config.kernels is KernelsChoice.TORCH:
        return TorchKernels()
    try:
        return CompiledKernels(batch_invariant=config.batch_invariant)
    except KernelsUnavailable as error:
        if config.batch_invariant:
            raise ConfigError("batch_invariant", f"needs the compiled kernels: {error}") from error
        if config.kernels is KernelsChoice.COMPILED:
            raise ConfigError("kernels", str(error)) from error
        logger.warning("computing with plain torch, several times slower: %s", error)
        return TorchKernels()
