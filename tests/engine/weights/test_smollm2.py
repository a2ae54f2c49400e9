"""The model that the project ships by name, against what transformers read from the same file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from engine.weights import ModelFiles, open_weights

pytestmark = pytest.mark.real_model

DATA = Path(__file__).parents[2] / "data"
RECORDED = DATA / "smollm2_weights.json"
REFERENCE = DATA / "reference_smollm2_135m.json"


def test_config(smollm2: ModelFiles) -> None:
    config = smollm2.config
    assert smollm2.name == "smollm2-135m"
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (8192, True)
    assert (smollm2.bos_token_id, smollm2.eos_token_ids) == (1, (2,))
    assert config.kv_bytes_per_token(4) == 46080


def test_fingerprint_is_the_one_that_was_recorded(smollm2: ModelFiles) -> None:
    """What other families need leaves it as it was; nodes of two releases know each other."""
    first_line = REFERENCE.read_text().partition("\n")[0]
    assert f'"fingerprint": "{smollm2.fingerprint}"' in first_line


def test_every_tensor_is_bitwise_that_of_transformers(smollm2: ModelFiles) -> None:
    recorded = json.loads(RECORDED.read_text())
    index = open_weights(smollm2.directory)
    assert set(index.names) == recorded.keys()
    for path, names in index.files().items():
        with safe_open(path, framework="numpy") as file:
            for name in names:
                digest = hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()
                assert digest == recorded[name], name
