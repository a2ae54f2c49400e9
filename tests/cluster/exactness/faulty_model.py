"""Models and runners that compute a little differently than they should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster import LocalConfig, NodeCompute, RunnerFactory
from cluster.exactness import MakeCompute
from engine.attention import Attention
from engine.model_runner import ModelRunner
from engine.models import CausalLM
from engine.weights import ModelConfig
from protocol import Role


@dataclass
class OneUlpOff:
    """A model whose first logit is the next number above the right one, in one row."""

    inner: CausalLM
    left: int = 1  # rows to spoil
    after: int = 20  # rows that are right

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        return self.inner.forward(input_ids, positions, attention, wanted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.inner.compute_logits(hidden).clone()  # the other one is for inference only
        for row in logits:
            self.after -= 1
            if self.left and self.after < 0:
                self.left -= 1
                row[0] = torch.nextafter(row[0], torch.tensor(torch.inf))
        return logits


@dataclass
class ForgetfulModel(OneUlpOff):
    """It takes the last token for another one, wherever several are computed at once."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        if len(input_ids) > 1:
            input_ids = input_ids.clone()
            input_ids[-1] = (input_ids[-1] + 1) % self.config.vocab_size
        return self.inner.forward(input_ids, positions, attention, wanted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.inner.compute_logits(hidden)


def spoiled(
    make: MakeCompute,
    where: Callable[[LocalConfig], bool],
    spoil: Callable[[CausalLM], CausalLM] = OneUlpOff,
) -> MakeCompute:
    """The models of those clusters are not quite right."""

    def make_compute(config: LocalConfig) -> RunnerFactory:
        factory = make(config)
        return _spoiling(factory, spoil) if where(config) else factory

    return make_compute


def _spoiling(factory: RunnerFactory, spoil: Callable[[CausalLM], CausalLM]) -> RunnerFactory:
    def make(role: Role) -> NodeCompute:
        compute = factory(role)
        assert isinstance(compute.runner, ModelRunner)
        compute.runner.model = spoil(compute.runner.model)
        return replace(compute, runner=compute.runner)

    return make
