"""What the engine's tests share: a tiny model, in our code and in transformers'; a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.models import CausalLM, load_model
from tests.engine.hosted_node import Node
from tests.engine.tiny import tiny_model_dir

Reference = Callable[[list[int]], Tensor]


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(scope="session")
def tiny_model(tiny_dir: Path) -> CausalLM:
    return load_model(tiny_dir)


@pytest.fixture(scope="session")
def reference(tiny_dir: Path) -> Reference:
    """Logits `[num_tokens, vocab_size]` of a whole sequence, computed by transformers."""
    return reference_for(tiny_dir)


def reference_for(directory: Path) -> Reference:
    """Of any family. Its every tensor comes from the directory, and every one there is used."""
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    model.eval()

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> Tensor:
        result: Tensor = model(torch.tensor([token_ids])).logits[0]
        return result

    return logits


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    made.host.start(made.role)
    yield made
    made.let_go()
    made.host.stop()
    assert not made.thread.is_alive()
