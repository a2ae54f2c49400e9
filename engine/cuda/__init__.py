"""How is a step computed on a CUDA device? Everything is queued; nothing waits but who must.

runner.py       a step: packed_step.py on the host, one copy (staging.py), then
                decode_graphs.py for decodes, or kernel by kernel
backends.py     which attention: flashinfer_attention.py, or varlen_attention.py
launched_step.py what comes back, when it is there
stream.py       the seam to the device: the rest runs as well, and is tested, without one
"""

from engine.cuda.attention_backend import AttentionBackend
from engine.cuda.backends import AttentionChoice, choose_backend
from engine.cuda.block_copier import CudaBlockCopier
from engine.cuda.runner import CudaRunner, CudaRunnerConfig
from engine.cuda.runner_factory import load_cuda_model, load_cuda_runner, make_cuda_runner
from engine.cuda.stream import CudaStream, Stream

__all__ = [
    "AttentionBackend",
    "AttentionChoice",
    "CudaBlockCopier",
    "CudaRunner",
    "CudaRunnerConfig",
    "CudaStream",
    "Stream",
    "choose_backend",
    "load_cuda_model",
    "load_cuda_runner",
    "make_cuda_runner",
]
