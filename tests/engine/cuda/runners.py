"""Runners for a device that is not there: the real one over a stand-in, and plain kernels."""

from __future__ import annotations

import torch

from engine.cuda.attention_backend import AttentionBackend
from engine.cuda.flashinfer_attention import FlashInferBackend
from engine.cuda.runner import CudaRunner, CudaRunnerConfig
from engine.cuda.varlen_attention import VarlenBackend
from engine.kv_cache import KVCache
from engine.kv_cache_config import KVCacheConfig
from engine.models import CausalLM
from tests.engine.cuda import reference_kernels
from tests.engine.cuda.deferred_stream import DeferredStream

KINDS = ("varlen", "flashinfer")
MAX_MODEL_LEN = 96


def make_backend(
    kind: str, stream: DeferredStream, kv_cache: KVCache, num_heads: int
) -> AttentionBackend:
    if kind == "varlen":
        return VarlenBackend(kv_cache, MAX_MODEL_LEN, kernel=reference_kernels.varlen_attn)
    return FlashInferBackend(
        reference_kernels.Library, stream, kv_cache, num_heads, (None,), MAX_MODEL_LEN
    )


def make_runner(
    model: CausalLM,
    stream: DeferredStream,
    kind: str = "varlen",
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_graph_seqs: int = 4,
    captured: bool = True,
) -> CudaRunner:
    shape = KVCacheConfig.for_model(model.config, num_blocks=num_blocks, block_size=block_size)
    kv_cache = KVCache(shape)
    kv_cache.tensor.fill_(torch.nan)  # reading what was not written shows
    backend = make_backend(kind, stream, kv_cache, model.config.num_attention_heads)
    config = CudaRunnerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        max_model_len=MAX_MODEL_LEN,
        max_graph_seqs=max_graph_seqs,
    )
    runner = CudaRunner(model, kv_cache, stream, backend, config)
    if captured:
        runner.capture()
    return runner
