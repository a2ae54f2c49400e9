"""A tiny Llama with random weights, written as a Hugging Face directory that can be served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.weights import ModelConfig, tensor_shapes

EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = ("<|im_start|>", EOS_TOKEN, "<|pad|>", "<|unk|>")
VOCAB_SIZE = 320  # 256 bytes, 4 special tokens, and pairs of letters

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The `config.json`; `overrides` replace or add keys."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    } | overrides


def tiny_model_dir(path: Path, seed: int = 0, gain: float = 2.0, **overrides: Any) -> Path:
    """Write config, weights, tokenizer and chat template into `path` and return it.

    `gain` is by how much a matrix makes its input larger. With 2 the best logits lie well apart,
    and rounding grows from layer to layer; with 1 it does not.
    """
    path.mkdir(parents=True, exist_ok=True)
    config_json = tiny_config(**overrides)
    (path / "config.json").write_text(json.dumps(config_json))
    config = ModelConfig.load(path / "config.json")
    save_file(_random_weights(config, seed, gain), path / "model.safetensors", {"format": "pt"})
    _write_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    return path


def _random_weights(config: ModelConfig, seed: int, gain: float) -> dict[str, torch.Tensor]:
    """Large enough that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.1 * noise
        else:
            weights[name] = noise * (0.5 if "embed" in name else gain / shape[-1] ** 0.5)
    return weights


def _write_tokenizer(path: Path) -> None:
    """Byte-level BPE: every text can be written, and common pairs of letters are one token."""
    byte_chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(byte_chars)}
    vocab |= {token: len(byte_chars) + index for index, token in enumerate(SPECIAL_TOKENS)}
    letters = "etaoinsh"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(vocab)]
    vocab |= {a + b: len(vocab) + index for index, (a, b) in enumerate(pairs)}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": EOS_TOKEN,
        "pad_token": "<|pad|>",
        "unk_token": "<|unk|>",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
