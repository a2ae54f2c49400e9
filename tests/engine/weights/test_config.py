from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.weights import ModelConfig
from protocol import ModelError
from tests.engine.weights.tiny_models import CONFIG

PATH = Path("/models/m/config.json")


def parse(**changes: Any) -> ModelConfig:
    """CONFIG with these keys changed, and without those that are `...`."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not ...}
    return ModelConfig.parse(json.dumps(config).encode(), PATH)


def test_reads_every_field() -> None:
    config = parse()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.intermediate_size) == (256, 512)
    assert (config.num_layers, config.num_attention_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.vocab_size, config.max_position_embeddings) == (64, 266, 128)
    assert (config.rope_theta, config.rms_norm_eps, config.hidden_act) == (10000.0, 1e-5, "silu")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (
        True,
        False,
        False,
    )
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


def test_kv_bytes_per_token() -> None:
    assert parse().kv_bytes_per_token(4) == 2 * 2 * 2 * 64 * 4
    assert parse().kv_bytes_per_token(2) == 2 * 2 * 2 * 64 * 2


def test_what_is_absent_has_hugging_face_s_default() -> None:
    config = parse(
        num_key_value_heads=...,
        head_dim=...,
        rms_norm_eps=...,
        rope_theta=...,
        tie_word_embeddings=...,
        bos_token_id=...,
        eos_token_id=...,
    )
    assert (config.num_kv_heads, config.head_dim) == (4, 64)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert config.tie_word_embeddings is False
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_null_is_as_good_as_absent() -> None:
    config = parse(head_dim=None, num_key_value_heads=None, rope_scaling=None, eos_token_id=None)
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (64, 4, ())


def test_several_eos_tokens() -> None:
    assert parse(eos_token_id=[2, 0]).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ],
)
def test_rope_theta_of_old_and_new_files(rope: dict[str, Any]) -> None:
    assert parse(**rope).rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; known: LlamaForCausalLM"),
        ({"architectures": ..., "model_type": "mamba"}, "'mamba'; known: LlamaForCausalLM"),
        ({"architectures": ..., "model_type": ...}, "known: LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "> 0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads (3)"),
        ({"num_attention_heads": 6, "head_dim": ...}, "head_dim is missing"),
        ({"head_dim": 63}, "must be even"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "256"}, "$.hidden_size"),
        ({"num_hidden_layers": 0}, "$.num_hidden_layers"),
        ({"rms_norm_eps": 0}, "$.rms_norm_eps"),
    ],
)
def test_refuses_and_names_file_and_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**changes)
    assert str(PATH) in str(caught.value)
    assert said in str(caught.value)
    assert caught.value.path == str(PATH)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"architectures": "x"}'])
def test_refuses_what_is_no_config(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"/models/m/config\.json"):
        ModelConfig.parse(content, PATH)


def test_architecture_follows_from_model_type() -> None:
    assert parse(architectures=...).architecture == "LlamaForCausalLM"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.load(tmp_path / "config.json")
