"""From a checked directory to a model that computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.engine_config import Quantization
from engine.kernels import Kernels, TorchKernels
from engine.models.causal_lm import CausalLM
from engine.models.layers import Layers
from engine.models.llama import llama
from engine.models.mapped_weights import MappedWeights
from engine.models.mistral import mistral
from engine.models.qwen2 import qwen2
from engine.models.qwen3 import qwen3
from engine.models.smollm3 import smollm3
from engine.weights import ModelConfig, open_packed, open_weights

ARCHITECTURES: Mapping[str, Callable[[ModelConfig, Layers], CausalLM]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SmolLM3ForCausalLM": smollm3,
}


def load_model(
    directory: Path,
    kernels: Kernels | None = None,
    *,
    quantization: Quantization | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    keep_packed: bool = True,
) -> CausalLM:
    """Map the weights of a Hugging Face directory, or bring them to `device` in `dtype`.

    `kernels`: what it computes with, by default plain torch. `keep_packed`: use weights of 4 bits
    as they are where the kernels can; the numbers are the same without, in more bytes.

    Raises ModelError: a file missing or broken, a model that the engine cannot run, tensors that
    are missing, superfluous or of the wrong shape.
    """
    config = ModelConfig.load(directory / "config.json")
    index = open_weights(directory)
    index.check(config, directory)
    kernels = kernels or TorchKernels()
    # In 4 bits the numbers are the same, but only as long as they are to be float32.
    keep_packed &= kernels.keeps_packed and quantization is None and dtype is torch.float32
    packed = open_packed(directory) if keep_packed else None
    layers = Layers(MappedWeights(index, dtype, device, packed), kernels, quantization)
    return ARCHITECTURES[config.architecture](config, layers)
