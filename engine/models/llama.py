"""The Llama architecture: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.attention import Attention
from engine.models.layers import RotaryEmbedding, Rotation, linear, rms_norm, silu_and_mul
from engine.models.mapped_weights import MappedWeights
from engine.weights import ModelConfig


class LlamaForCausalLM:
    """See `engine.models.CausalLM`."""

    def __init__(self, config: ModelConfig, weights: MappedWeights) -> None:
        self.config = config
        self._embeddings = weights.tensor("model.embed_tokens.weight")
        self._layers = [
            _DecoderLayer.load(index, config, weights) for index in range(config.num_layers)
        ]
        self._norm = weights.tensor("model.norm.weight")
        self._lm_head = (
            self._embeddings if config.tie_word_embeddings else weights.tensor("lm_head.weight")
        )
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_theta)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        rotation = self._rotary.at(positions)
        hidden = F.embedding(input_ids, self._embeddings)
        for layer in self._layers:
            hidden = layer.forward(hidden, rotation, attention)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return linear(normed, self._lm_head).to(torch.float32)


@dataclass(frozen=True)
class _Projection:
    weight: Tensor  # [out, in]
    bias: Tensor | None

    @classmethod
    def load(cls, weights: MappedWeights, *names: str, bias: bool) -> _Projection:
        """One projection, or several that read the same input, as one."""
        return cls(
            weight=weights.stacked(*(f"{name}.weight" for name in names)),
            bias=weights.stacked(*(f"{name}.bias" for name in names)) if bias else None,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _DecoderLayer:
    index: int
    config: ModelConfig
    attention_norm: Tensor
    qkv: _Projection
    output: _Projection
    mlp_norm: Tensor
    gate_up: _Projection
    down: _Projection

    @classmethod
    def load(cls, index: int, config: ModelConfig, weights: MappedWeights) -> _DecoderLayer:
        prefix = f"model.layers.{index}"
        q, k, v, o = (f"{prefix}.self_attn.{name}_proj" for name in "qkvo")
        gate, up, down = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        return cls(
            index=index,
            config=config,
            attention_norm=weights.tensor(f"{prefix}.input_layernorm.weight"),
            qkv=_Projection.load(weights, q, k, v, bias=config.attention_bias),
            output=_Projection.load(weights, o, bias=config.attention_bias),
            mlp_norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=_Projection.load(weights, gate, up, bias=config.mlp_bias),
            down=_Projection.load(weights, down, bias=config.mlp_bias),
        )

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        eps = self.config.rms_norm_eps
        normed = rms_norm(hidden, self.attention_norm, eps)
        hidden = hidden + self._attend(normed, rotation, attention)
        normed = rms_norm(hidden, self.mlp_norm, eps)
        return hidden + self.down(silu_and_mul(self.gate_up(normed)))

    def _attend(self, normed: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        num_heads = self.config.num_attention_heads
        num_rotated = num_heads + self.config.num_kv_heads  # queries and keys
        heads = self.qkv(normed).view(len(normed), -1, self.config.head_dim)
        rotated = rotation(heads[:, :num_rotated])
        query, key, value = rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_rotated:]
        return self.output(attention(self.index, query, key, value).flatten(1))
