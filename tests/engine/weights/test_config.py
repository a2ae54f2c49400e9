from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.weights import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    YarnScaling,
)
from protocol import ModelError
from tests.engine.weights.tiny_models import CONFIG

PATH = Path("/models/m/config.json")

KNOWN = (
    "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, SmolLM3ForCausalLM"
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
LONG = {"rope_type": "longrope", "short_factor": [2.0] * 32, "long_factor": [2.0] * 32}


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
        ({"architectures": ["MambaForCausalLM"]}, f"MambaForCausalLM; known: {KNOWN}"),
        ({"architectures": ..., "model_type": "mamba"}, f"'mamba'; known: {KNOWN}"),
        ({"architectures": ..., "model_type": ...}, f"known: {KNOWN}"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear': Object missing required field `factor`"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "$.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "unknown field `beta`"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "`mrope_section`"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            "'dynamic' is not supported; known: default, linear, llama3, longrope, yarn",
        ),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "must be less than"),
        ({"rope_scaling": YARN | {"beta_fast": 1.0}}, "beta_slow (1.0) must be less than"),
        ({"rope_scaling": LONG | {"long_factor": [9.0] * 32}}, "short_factor equals long_factor"),
        ({"rope_scaling": LONG | {"short_factor": [1.0], "long_factor": [1.0]}}, "asks for 32"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "known: full_attention,"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "for layers [1]"),
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


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
    ],
)
def test_architecture_follows_from_model_type(model_type: str, architecture: str) -> None:
    assert parse(architectures=..., model_type=model_type).architecture == architecture


def of(architecture: str, **changes: Any) -> ModelConfig:
    """Like `parse`, for another family, and with 6 layers."""
    return parse(architectures=[architecture], **{"num_hidden_layers": 6} | changes)


def windows(config: ModelConfig) -> list[int | None]:
    return [config.window(layer) for layer in range(config.num_layers)]


def test_a_llama_has_no_window_and_biases_where_it_says_so() -> None:
    config = parse(sliding_window=16, attention_bias=True, mlp_bias=True)
    assert windows(config) == [None, None]
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (True,) * 3
    assert not config.qk_norm
    assert all(config.rotates(layer) for layer in range(2))


@pytest.mark.parametrize(
    ("changes", "window"),
    [({}, 4096), ({"sliding_window": 16}, 16), ({"sliding_window": None}, None)],
)
def test_mistral_has_its_window_everywhere(changes: dict[str, Any], window: int | None) -> None:
    config = of("MistralForCausalLM", attention_bias=True, **changes)
    assert windows(config) == [window] * 6
    assert not config.attention_bias  # a key that Mistral does not have


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [None] * 6),
        ({"sliding_window": 16, "max_window_layers": 2}, [None] * 6),
        ({"use_sliding_window": True}, [None] * 6),
        ({"use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [4096] * 2),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 3}, [3] * 6),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [None] * 6),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["full_attention", "sliding_attention"] * 3,
            },
            [None, 5] * 3,
        ),
    ],
)
def test_qwen_has_windows_in_some_layers(
    family: str, changes: dict[str, Any], expected: list[int | None]
) -> None:
    assert windows(of(family, **changes)) == expected


def test_qwen2_has_biases_without_saying_so() -> None:
    config = of("Qwen2ForCausalLM", attention_bias=False, mlp_bias=True)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (
        True,
        False,
        False,
    )


def test_qwen3_normalises_heads_whose_size_is_its_own() -> None:
    config = of("Qwen3ForCausalLM", head_dim=...)
    assert (config.qk_norm, config.head_dim) == (True, 128)
    assert (config.attention_bias, config.attention_output_bias) == (False, False)
    assert of("Qwen3ForCausalLM", attention_bias=True).attention_output_bias


@pytest.mark.parametrize(
    ("changes", "rope_free"),
    [
        ({}, (3,)),
        ({"no_rope_layer_interval": 2}, (1, 3, 5)),
        ({"no_rope_layers": [1, 0, 1, 1, 0, 1]}, (1, 4)),
        ({"no_rope_layers": [1] * 6 + [0]}, ()),
    ],
)
def test_smollm3_has_layers_without_positions(
    changes: dict[str, Any], rope_free: tuple[int, ...]
) -> None:
    config = of("SmolLM3ForCausalLM", **changes)
    assert tuple(layer for layer in range(6) if not config.rotates(layer)) == rope_free
    assert windows(config) == [None] * 6


def test_smollm3_has_windows_where_it_has_no_positions() -> None:
    config = of("SmolLM3ForCausalLM", use_sliding_window=True, sliding_window=7)
    assert windows(config) == [None, None, None, 7, None, None]


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "[0, 1, 2, 3, 4, 5]"),
        ("SmolLM3ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "it is layers [] that"),
        ("MistralForCausalLM", {"layer_types": ["full_attention"] * 6}, "for layers []"),
        ("Qwen2ForCausalLM", {"num_key_value_heads": ...}, "num_key_value_heads (32)"),
    ],
)
def test_families_refuse_contradictions(family: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        of(family, **changes)
    assert said in str(caught.value)


def test_defaults_of_a_family() -> None:
    config = of("SmolLM3ForCausalLM", rope_theta=..., tie_word_embeddings=...)
    assert (config.rope_theta, config.tie_word_embeddings) == (2e6, True)


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"type": "default"}, None),
        ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        (
            LLAMA3,
            Llama3Scaling(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        ),
        (LONG, FrequencyDivisors(divisors=(2.0,) * 32, attention_factor=1.0)),
        (
            YARN | {"finetuned": True},
            YarnScaling(
                factor=4.0,
                original_max_position_embeddings=100,
                attention_factor=0.1 * math.log(4) + 1,
                beta_fast=32.0,
                beta_slow=1.0,
                truncate=True,
            ),
        ),
    ],
)
def test_rope_scaling(rope: dict[str, Any], scaling: RopeScaling | None) -> None:
    assert parse(rope_scaling=rope).rope_scaling == scaling
    new_style = {"rope_parameters": rope | {"rope_theta": 5e5}, "rope_theta": ...}
    assert parse(**new_style).rope_scaling == scaling
    assert parse(**new_style).rope_theta == 5e5


def test_the_old_context_may_stand_elsewhere() -> None:
    for kind in (YARN, LLAMA3):
        rope = {k: v for k, v in kind.items() if k != "original_max_position_embeddings"}
        for changes, expected in (({}, 128), ({"original_max_position_embeddings": 32}, 32)):
            scaling = parse(rope_scaling=rope, **changes).rope_scaling
            assert isinstance(scaling, Llama3Scaling | YarnScaling)
            assert scaling.original_max_position_embeddings == expected
    assert parse(original_max_position_embeddings=32).rope_scaling is None


def test_yarn_makes_room_for_more_positions() -> None:
    assert parse(rope_scaling=YARN).max_position_embeddings == 400
    assert parse(rope_scaling=YARN | {"factor": None}).max_position_embeddings == 128
    assert parse(rope_scaling={"type": "linear", "factor": 2}).max_position_embeddings == 128


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        ModelConfig.load(tmp_path / "config.json")
