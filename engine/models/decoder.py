"""What decoder-only models have in common: everything but how their queries meet their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import Attention
from engine.models.layers import Layers, Rotation
from engine.models.rotary import rotary_embedding
from engine.models.self_attention import AttentionFactory
from engine.weights import ModelConfig


class Decoder:
    """A pre-norm transformer (https://arxiv.org/abs/2002.04745). See `engine.models.CausalLM`."""

    def __init__(self, config: ModelConfig, layers: Layers, attention: AttentionFactory) -> None:
        self.config = config
        self._embed = layers.embedding("model.embed_tokens")
        self._rotary = rotary_embedding(config, layers)
        self._layers = [
            _DecoderLayer(layer, config, layers, attention) for layer in range(config.num_layers)
        ]
        self._norm = layers.rms_norm("model.norm", config.rms_norm_eps)
        tied = config.tie_word_embeddings
        self._lm_head = layers.linear("model.embed_tokens" if tied else "lm_head")

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        rotation = self._rotary.at(positions)
        hidden = self._embed(input_ids)
        *layers, last = self._layers
        for layer in layers:
            hidden = layer(hidden, rotation, attention)
        return last(hidden, rotation, attention, wanted)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(self._norm(hidden)).to(torch.float32)


class _DecoderLayer:
    """Attention and a feed-forward network, each over normed input and added to it."""

    def __init__(
        self, layer: int, config: ModelConfig, layers: Layers, attention: AttentionFactory
    ) -> None:
        name, eps = f"model.layers.{layer}", config.rms_norm_eps
        self._attention_norm = layers.rms_norm(f"{name}.input_layernorm", eps)
        self._attention = attention(layer, config, layers)
        self._mlp_norm = layers.rms_norm(f"{name}.post_attention_layernorm", eps)
        self._mlp = _FeedForward(f"{name}.mlp", config, layers)

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attend: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        heads = self._attention(self._attention_norm(hidden), rotation, attend)
        if wanted is not None:
            heads, hidden = heads[wanted], hidden[wanted]
        hidden = self._attention.output(heads, residual=hidden)
        return self._mlp(self._mlp_norm(hidden), residual=hidden)


class _FeedForward:
    """SwiGLU (https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, name: str, config: ModelConfig, layers: Layers) -> None:
        gate, up, down = (f"{name}.{part}_proj" for part in ("gate", "up", "down"))
        self._gate_up = layers.gated_linear(gate, up, bias=config.mlp_bias)
        self._down = layers.linear(down, bias=config.mlp_bias)

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._down(self._gate_up(x), residual)
