"""A Llama with random weights, for a machine that has no model and cannot fetch one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.weights import ModelConfig, tensor_shapes

# About 1.2 billion weights, in the shape of Llama 3.2 1B.
MEDIUM = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}


def write_random_model(directory: Path, sizes: dict[str, int], device: str = "cpu") -> Path:
    """A Hugging Face directory without a tokenizer, in bfloat16."""
    content = sizes | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(ModelConfig.load(path)).items():
        noise = torch.randn(shape, generator=generator, device=device)
        weight = 1.0 + 0.1 * noise if "norm" in name else noise * 2.0 / shape[-1] ** 0.5
        weights[name] = weight.to(torch.bfloat16).cpu()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory
