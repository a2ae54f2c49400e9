"""The engine on a CPU, against the limits of the machine that are measured in the same run.

    python benchmarks/engine.py [--json]

Counted first, with weights of 32 bits each: a step has to read the weights once and the keys and
values of its requests once, and to do two operations for each weight and token, and for attention.
The limits are how fast all cores read memory (the sum of a large tensor) and multiply (the fastest
of torch's products of large matrices). Rows, each with what it is divided by:

    read, multiply          the limits themselves
    decode_B_C              tokens a second of B requests with C tokens each, against what the
                            slower of the two limits allows: so the ratio is the share of it
    prefill_N               the same of a prompt of N tokens
    *_invariant             with batch_invariant, against without: what exactness costs
    *_packed                with the weights of 4 bits that the model's file has, against float32
    *_int8                  with weights of 8 bits, against float32
    *_kv_bf16               with keys and values in bfloat16, against float32
    *_torch                 the compiled kernels against plain torch

Limits and steps are measured in turns, and medians compared.
"""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from benchmarks._clusters import model_files
from benchmarks._result import Result, report
from benchmarks._steps import decode_step, last_step, next_step, prefill_step, prompt_ids
from engine import EngineConfig, KernelsChoice, Quantization
from engine.kernels import choose_kernels
from engine.model_runner import ModelRunner
from engine.models import load_model
from engine.runner_factory import make_model_runner
from engine.weights import ModelConfig, tensor_shapes

BATCHES = (1, 4, 16, 64)
CONTEXTS = (128, 1024, 4096)
PREFILLS = (128, 512, 2048)
BLOCK_SIZE = 16
STEPS = 6  # of one turn
TURNS = 5
BYTES = 4


@dataclass(frozen=True)
class Work:
    """What a step has to do at least."""

    num_bytes: int
    operations: int

    def seconds(self, limits: "Limits") -> float:
        return max(self.num_bytes / limits.read, self.operations / limits.multiply)


@dataclass(frozen=True)
class Limits:
    read: float  # bytes a second
    multiply: float  # operations a second


class Model:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    @cached_property
    def num_weights(self) -> int:
        """Those that every token is multiplied with; a tied embedding is the output's."""
        shapes = tensor_shapes(self.config)
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        if not self.config.tie_word_embeddings:
            sizes.pop("model.embed_tokens.weight")
        return sum(sizes.values())

    @property
    def num_output_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def decode(self, batch: int, context: int) -> Work:
        keys_and_values = batch * context * self.config.kv_bytes_per_token(BYTES)
        return Work(
            self.num_weights * BYTES + keys_and_values,
            2 * batch * self.num_weights + batch * self.attention(context),
        )

    def prefill(self, num_tokens: int) -> Work:
        """Only the last token gets logits."""
        dense = 2 * num_tokens * (self.num_weights - self.num_output_weights)
        attention = sum(self.attention(position) for position in range(1, num_tokens + 1))
        return Work(self.num_weights * BYTES, dense + 2 * self.num_output_weights + attention)

    def attention(self, context: int) -> int:
        """Operations of one token that sees `context` tokens, in all layers."""
        size = self.config.num_attention_heads * self.config.head_dim
        return 4 * size * context * self.config.num_layers


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Machine:
    """The limits, measured again and again."""

    def __init__(self) -> None:
        self._memory = torch.ones(128 * 1024 * 1024)
        self._left, self._right = torch.randn(2048, 1024), torch.randn(1024, 1024)
        self.measure()

    def measure(self) -> Limits:
        reads = [seconds_of(self._memory.sum) for _ in range(2)]
        products = [seconds_of(lambda: self._left @ self._right) for _ in range(4)]
        operations = 2 * self._left.numel() * self._right.shape[1]
        return Limits(self._memory.nbytes / min(reads), operations / min(products))


class Engine:
    def __init__(
        self, model: Model, config: EngineConfig, max_tokens: int, *, keep_packed: bool = False
    ) -> None:
        self._model = model
        kernels = choose_kernels(config)
        self.runner: ModelRunner = make_model_runner(
            load_model(
                model_files().directory,
                kernels,
                quantization=config.quantization,
                keep_packed=keep_packed,
            ),
            num_blocks=1 + max_tokens // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            kv_cache_dtype=config.cache_dtype,
            kernels=kernels,
        )
        self.runner.kv_cache.tensor.zero_()  # contexts are not computed: they must not be NaN

    def decode_s(self, batch: int, context: int) -> float:
        """Seconds of a step, sampling included."""
        blocks = blocks_of(context)
        vocab_size = self._model.config.vocab_size
        self.runner.execute(decode_step(vocab_size, batch, context, blocks))
        times = [
            seconds_of(lambda: self.runner.execute(next_step(batch, length)))  # noqa: B023
            for length in range(context + 1, context + 1 + STEPS)
        ]
        self.runner.execute(last_step(batch))
        return statistics.median(times)

    def prefill_s(self, num_tokens: int) -> float:
        prompt = prompt_ids(self._model.config.vocab_size, num_tokens)
        step = prefill_step(prompt, BLOCK_SIZE)
        seconds = seconds_of(lambda: self.runner.execute(step))
        self.runner.execute(last_step(1))
        return seconds


def blocks_of(context: int) -> int:
    return -(-(context + STEPS + 1) // BLOCK_SIZE)


def tokens_of(batch: int, context: int) -> int:
    return batch * blocks_of(context) * BLOCK_SIZE


def fits(model: Model, num_tokens: int) -> bool:
    """Whether so much KV leaves room for everything else."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return num_tokens * model.config.kv_bytes_per_token(BYTES) < free * 0.6


class Bench:
    def __init__(self) -> None:
        self.machine = Machine()
        self.model = Model(model_files().config)
        wanted = [(b, c) for b in BATCHES for c in CONTEXTS]
        self.decodes = [(b, c) for b, c in wanted if fits(self.model, tokens_of(b, c))]
        for batch, context in set(wanted) - set(self.decodes):
            print(f"too little memory for decode_{batch}_{context}", file=sys.stderr)
        self._max_tokens = max(tokens_of(b, c) for b, c in self.decodes)
        self.engine = Engine(self.model, EngineConfig(), self._max_tokens)

    def other(
        self, config: EngineConfig, max_tokens: int = 16 * 1088, *, keep_packed: bool = False
    ) -> Engine:
        return Engine(self.model, config, max_tokens, keep_packed=keep_packed)

    def limits(self) -> list[Result]:
        measured = [self.machine.measure() for _ in range(TURNS)]
        read = statistics.median(limits.read for limits in measured)
        multiply = statistics.median(limits.multiply for limits in measured)
        best = max(limits.read for limits in measured), max(limits.multiply for limits in measured)
        return [
            Result("read", read / 1e9, "GB/s", best[0] / 1e9, "the best of the turns"),
            Result("multiply", multiply / 1e9, "Gop/s", best[1] / 1e9, "the best of the turns"),
        ]

    def share(self, name: str, tokens: int, work: Work, step_s: Callable[[], float]) -> Result:
        """In turns with the limits."""
        step_s()
        turns = [(self.machine.measure(), step_s()) for _ in range(TURNS)]
        seconds = statistics.median(took for _, took in turns)
        least = statistics.median(work.seconds(limits) for limits, _ in turns)
        return Result(name, tokens / seconds, "tokens/s", tokens / least, "the limit")

    def versus(
        self,
        name: str,
        tokens: int,
        ours: Callable[[], float],
        theirs: Callable[[], float],
        what: str = "without",
    ) -> Result:
        ours()
        theirs()
        turns = [(ours(), theirs()) for _ in range(TURNS)]
        seconds = [statistics.median(times) for times in zip(*turns, strict=True)]
        return Result(name, tokens / seconds[0], "tokens/s", tokens / seconds[1], what)


def shares(bench: Bench) -> list[Result]:
    engine, model = bench.engine, bench.model
    decodes = [
        bench.share(
            f"decode_{batch}_{context}",
            batch,
            model.decode(batch, context),
            lambda: engine.decode_s(batch, context),  # noqa: B023
        )
        for batch, context in bench.decodes
    ]
    prefills = [
        bench.share(
            f"prefill_{length}",
            length,
            model.prefill(length),
            lambda: engine.prefill_s(length),  # noqa: B023
        )
        for length in PREFILLS
    ]
    return decodes + prefills


def variants(bench: Bench) -> list[Result]:
    plain = bench.engine
    invariant = bench.other(EngineConfig(batch_invariant=True))
    results = [
        bench.versus(
            f"prefill_{length}_invariant",
            length,
            lambda: invariant.prefill_s(length),  # noqa: B023
            lambda: plain.prefill_s(length),  # noqa: B023
        )
        for length in (512, 2048)
    ]
    others = {
        "invariant": invariant,
        "packed": bench.other(EngineConfig(), keep_packed=True),
        "int8": bench.other(EngineConfig(quantization=Quantization.INT8)),
        "kv_bf16": bench.other(EngineConfig(kv_cache_dtype="bfloat16")),
    }
    for name, other in others.items():
        for batch, context in ((1, 128), (4, 1024), (16, 1024)):
            results.append(
                bench.versus(
                    f"decode_{batch}_{context}_{name}",
                    batch,
                    lambda: other.decode_s(batch, context),  # noqa: B023
                    lambda: plain.decode_s(batch, context),  # noqa: B023
                )
            )
    torch_engine = bench.other(EngineConfig(kernels=KernelsChoice.TORCH))
    for batch, context in ((1, 128), (16, 128), (4, 1024)):
        results.append(
            bench.versus(
                f"decode_{batch}_{context}_torch",
                batch,
                lambda: plain.decode_s(batch, context),  # noqa: B023
                lambda: torch_engine.decode_s(batch, context),  # noqa: B023
                "plain torch",
            )
        )
    return results


def main() -> None:
    bench = Bench()
    report(bench.limits())
    report(shares(bench))
    report(variants(bench))


if __name__ == "__main__":
    main()
