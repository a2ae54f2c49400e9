"""What benchmarks/gpu.py measures on: a CUDA device, or, to try the script itself, the CPU."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from engine import KVCacheConfig, StepHandle
from engine.cuda import (
    AttentionChoice,
    CudaBlockCopier,
    CudaRunner,
    CudaRunnerConfig,
    CudaStream,
    choose_backend,
)
from engine.kv_cache import KVCache
from engine.model_runner import ModelRunner
from engine.models import CausalLM, load_model
from kv_transfer import BlockCopier
from scheduler import ModelRunnerOutput, SchedulerOutput

_SAMPLES = 5


class Launcher(Protocol):
    """A runner that takes steps on before their tokens are read."""

    def launch(self, step: SchedulerOutput) -> StepHandle: ...


class Computed:
    """A step that was computed when it was launched."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


class CpuLauncher:
    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, step: SchedulerOutput) -> Computed:
        return Computed(self._runner.execute(step))


class Machine(Protocol):
    """A device, and how large what is measured on it should be."""

    name: str
    device: str
    dtype: str
    copier: BlockCopier | None
    copy_bytes: int
    gemm_size: int

    def load(self, directory: Path) -> CausalLM: ...

    def free_bytes(self) -> int: ...

    def synchronize(self) -> None: ...

    def runner(
        self, model: CausalLM, kv_cache: KVCache, config: CudaRunnerConfig, *, graphs: bool
    ) -> Launcher: ...


class CudaMachine:
    """Raises ConfigError: there is no such device."""

    dtype = "bfloat16"
    copy_bytes = 1 << 30
    gemm_size = 8192

    def __init__(self, device: str = "cuda", attention: str = "auto") -> None:
        self._stream = CudaStream(device)
        self._attention = AttentionChoice(attention)
        self.device = str(self._stream.device)
        self.name = torch.cuda.get_device_name(self._stream.device)
        self.copier: BlockCopier | None = CudaBlockCopier(self._stream.device)

    def load(self, directory: Path) -> CausalLM:
        return load_model(directory, device=self.device, dtype=torch.bfloat16)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._stream.device)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._stream.device)

    def runner(
        self, model: CausalLM, kv_cache: KVCache, config: CudaRunnerConfig, *, graphs: bool
    ) -> CudaRunner:
        backend = choose_backend(
            self._attention, self._stream, kv_cache, model.config, config.max_model_len
        )
        self.synchronize()  # the weights, and a filled cache, have come by another stream
        runner = CudaRunner(model, kv_cache, self._stream, backend, config)
        if graphs:
            runner.capture()
        return runner


class CpuMachine:
    """Says nothing about any GPU."""

    name = "cpu"
    device = "cpu"
    dtype = "float32"
    copier: BlockCopier | None = None
    copy_bytes = 1 << 22
    gemm_size = 128

    def load(self, directory: Path) -> CausalLM:
        return load_model(directory)

    def free_bytes(self) -> int:
        return 1 << 28

    def synchronize(self) -> None:
        pass

    def runner(
        self, model: CausalLM, kv_cache: KVCache, config: CudaRunnerConfig, *, graphs: bool
    ) -> CpuLauncher:
        return CpuLauncher(ModelRunner(model, kv_cache))


def kv_cache_on(machine: Machine, model: CausalLM, num_blocks: int, block_size: int) -> KVCache:
    shape = KVCacheConfig.for_model(
        model.config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=machine.dtype,
        device=machine.device,
    )
    return KVCache(shape)


def best_s(machine: Machine, work: Callable[[], object]) -> float:
    """The shortest of some runs, after one that does not count."""
    times = []
    for _ in range(_SAMPLES + 1):
        machine.synchronize()
        began = time.perf_counter()
        work()
        machine.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def copy_rate(machine: Machine) -> float:
    """Bytes a second that memory gives and takes together."""
    source = torch.ones(machine.copy_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * machine.copy_bytes / best_s(machine, lambda: target.copy_(source))


def gemm_rate(machine: Machine) -> float:
    """Operations a second of one large product of matrices."""
    size, dtype = machine.gemm_size, getattr(torch, machine.dtype)
    a = torch.randn(size, size, device=machine.device).to(dtype)
    b = torch.randn(size, size, device=machine.device).to(dtype)
    return 2 * size**3 / best_s(machine, lambda: a @ b)
