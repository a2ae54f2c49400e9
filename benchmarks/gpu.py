"""The engine on one CUDA device, against the limits measured in the same run; one JSON object a
line.

    python benchmarks/gpu.py [--model DIRECTORY] [--attention auto|flashinfer|varlen]
    python benchmarks/gpu.py --dry-run        tries the script on the CPU, with a tiny model

Takes less than 10 minutes, and needs no network: the model is a directory, or the built-in one if
it has been fetched, or one of random weights. Measured are

    limits      bytes a second of a copy within the device, operations a second of one bf16 GEMM
    decode      tokens a second, and the share of the time that the bytes of a step take at least
    graphs      the same kernels without their CUDA graph, and whether the numbers are the same
    prefill     2,048 tokens, and the share of the time that their operations take at least
    handoff     P and D in two processes on this device by nixl: whether tokens are those of one
                process, and how fast blocks travel

Without a CUDA device it says so, and measures nothing.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._gpu_machine import (
    CpuMachine,
    CudaMachine,
    Launcher,
    Machine,
    copy_rate,
    gemm_rate,
    kv_cache_on,
)
from benchmarks._gpu_node import LIMITS, Order, Outcome
from benchmarks._random_model import MEDIUM, TINY, write_random_model
from benchmarks._steps import decode_step, last_step, next_step, prefill_step, prompt_ids
from engine.cuda import CudaRunnerConfig
from engine.kv_cache import KVCache
from engine.weights import ModelConfig, tensor_shapes
from protocol import ConfigError

ROOT = Path(__file__).parents[1]
BUILTIN = Path.home() / ".cache" / "kvrelay" / "builtin"


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    contexts: tuple[int, ...] = (128, 1024, 4096)
    num_steps: int = 48
    prefill: int = 2048
    block_size: int = 256
    prompt_lens: tuple[int, ...] = (100, 255, 256, 700, 1500, 2048)
    num_tokens: int = 24
    max_seconds: float = 480.0  # then what is left is left out, and said to be


TRIAL = Plan(
    batches=(1, 3),
    contexts=(16, 40),
    num_steps=3,
    prefill=64,
    block_size=16,
    prompt_lens=(5, 40),
    num_tokens=4,
)


def say(name: str, **values: Any) -> dict[str, Any]:
    line = {"name": name, **values}
    print(json.dumps(line), flush=True)
    return line


def decode_s(
    runner: Launcher, model: ModelConfig, batch: int, context: int, plan: Plan
) -> tuple[float, list[Any]]:
    """Seconds a step, each launched before the tokens of the one before are read; the tokens."""
    blocks = -(-(context + plan.num_steps + 2) // plan.block_size)
    tokens = [
        runner.launch(decode_step(model.vocab_size, batch, context, blocks))
        .result()
        .sampled_token_ids
    ]
    began = time.perf_counter()
    handle = runner.launch(next_step(batch, context + 1))
    for n in range(1, plan.num_steps):
        following = runner.launch(next_step(batch, context + 1 + n))
        tokens.append(handle.result().sampled_token_ids)
        handle = following
    tokens.append(handle.result().sampled_token_ids)
    seconds = (time.perf_counter() - began) / plan.num_steps
    runner.launch(last_step(batch)).result()
    return seconds, tokens


# ---------------------------------------------------------------------- limits


def num_weights(model: ModelConfig) -> int:
    """That a token is multiplied with."""
    shapes = tensor_shapes(model)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    if model.tie_word_embeddings:
        return total
    return total - torch.Size(shapes["model.embed_tokens.weight"]).numel()


def decode_bytes(model: ModelConfig, batch: int, context: int, itemsize: int) -> int:
    """What a step has to read at least: all weights, and the keys and values of all sequences."""
    return num_weights(model) * itemsize + batch * context * model.kv_bytes_per_token(itemsize)


def prefill_operations(model: ModelConfig, num_tokens: int) -> int:
    """Multiplications and additions, without logits, of which there is one row only."""
    embedding = model.vocab_size * model.hidden_size
    products = 2 * (num_weights(model) - embedding) * num_tokens
    heads = model.num_layers * model.num_attention_heads * model.head_dim
    return products + 2 * heads * num_tokens**2  # scores and values, each of half the square


# ---------------------------------------------------------------------- what is measured


class Bench:
    def __init__(self, machine: Machine, directory: Path, plan: Plan) -> None:
        self.machine = machine
        self.directory = directory
        self.plan = plan
        self.deadline = time.monotonic() + plan.max_seconds
        self.model = machine.load(directory)
        self.config = self.model.config
        self.itemsize = getattr(torch, machine.dtype).itemsize

    def limits(self) -> None:
        self.bytes_per_s = copy_rate(self.machine)
        self.operations_per_s = gemm_rate(self.machine)
        say(
            "limits",
            device=self.machine.name,
            model=str(self.directory),
            dtype=self.machine.dtype,
            copy_gb_per_s=round(self.bytes_per_s / 1e9, 1),
            gemm_tflops=round(self.operations_per_s / 1e12, 2),
        )

    def cases(self) -> Iterator[tuple[int, int]]:
        for context in self.plan.contexts:
            for batch in self.plan.batches:
                if time.monotonic() > self.deadline:
                    say("decode", batch=batch, context=context, left_out="out of time")
                else:
                    yield batch, context

    def cache_for(self, batch: int, context: int) -> KVCache | None:
        """Zeros, as if so much had been computed; None: there is no room."""
        length = context + self.plan.num_steps + 2
        num_blocks = 1 + batch * -(-length // self.plan.block_size)
        needed = num_blocks * self.plan.block_size * self.config.kv_bytes_per_token(self.itemsize)
        if needed > 0.8 * self.machine.free_bytes():
            return None
        cache = kv_cache_on(self.machine, self.model, num_blocks, self.plan.block_size)
        cache.tensor.zero_()
        return cache

    def limits_for(self, batch: int, context: int) -> CudaRunnerConfig:
        return CudaRunnerConfig(
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, self.plan.prefill),
            max_model_len=max(context + self.plan.num_steps + 2, self.plan.prefill + 1),
        )

    def decode(self) -> None:
        for batch, context in self.cases():
            cache = self.cache_for(batch, context)
            if cache is None:
                say("decode", batch=batch, context=context, left_out="no room for its KV")
                continue
            self._decode(batch, context, cache)
            del cache

    def _decode(self, batch: int, context: int, cache: KVCache) -> None:
        config = self.limits_for(batch, context)
        runner = self.machine.runner(self.model, cache, config, graphs=True)
        seconds, tokens = decode_s(runner, self.config, batch, context, self.plan)
        length = context + self.plan.num_steps // 2
        least = decode_bytes(self.config, batch, length, self.itemsize) / self.bytes_per_s
        result = say(
            "decode",
            batch=batch,
            context=context,
            step_ms=round(1e3 * seconds, 4),
            tokens_per_s=round(batch / seconds, 1),
            least_ms=round(1e3 * least, 4),
            share_of_limit=round(least / seconds, 3),
        )
        if context == self.plan.contexts[0]:
            self._without_graph(batch, context, cache, result["step_ms"], tokens)

    def _without_graph(
        self, batch: int, context: int, cache: KVCache, with_graph_ms: float, tokens: list[Any]
    ) -> None:
        """The same from the same start; all that was written is compared too."""
        after = cache.tensor[1:].clone()
        cache.tensor.zero_()
        config = self.limits_for(batch, context)
        runner = self.machine.runner(self.model, cache, config, graphs=False)
        seconds, eager = decode_s(runner, self.config, batch, context, self.plan)
        say(
            "graphs",
            batch=batch,
            context=context,
            step_ms=with_graph_ms,
            eager_step_ms=round(1e3 * seconds, 4),
            same_tokens=eager == tokens,
            same_kv=bool(torch.equal(cache.tensor[1:], after)),
        )

    def prefill(self) -> None:
        num_tokens = self.plan.prefill
        num_blocks = -(-num_tokens // self.plan.block_size)
        cache = kv_cache_on(self.machine, self.model, 1 + num_blocks, self.plan.block_size)
        config = self.limits_for(1, num_tokens)
        runner = self.machine.runner(self.model, cache, config, graphs=False)
        seconds = min(self._prefill_s(runner, n) for n in range(4))
        least = prefill_operations(self.config, num_tokens) / self.operations_per_s
        say(
            "prefill",
            tokens=num_tokens,
            ms=round(1e3 * seconds, 3),
            tokens_per_s=round(num_tokens / seconds, 1),
            least_ms=round(1e3 * least, 3),
            share_of_limit=round(least / seconds, 3),
        )

    def _prefill_s(self, runner: Launcher, seed: int) -> float:
        num_tokens = self.plan.prefill
        prompt = prompt_ids(self.config.vocab_size, num_tokens, seed)
        step = prefill_step(prompt, self.plan.block_size)
        self.machine.synchronize()
        began = time.perf_counter()
        runner.launch(step).result()
        seconds = time.perf_counter() - began
        runner.launch(last_step(1)).result()
        return seconds

    # ------------------------------------------------------------------ the hand-off

    def handoff(self) -> dict[str, Any]:
        generator = random.Random(7)
        prompts = [
            generator.choices(range(2, self.config.vocab_size), k=length)
            for length in self.plan.prompt_lens
        ]
        expected = [self._generate(prompt) for prompt in prompts]
        prefill, decode = hand_off(
            self.directory,
            prompts,
            self.plan.num_tokens,
            block_size=self.plan.block_size,
            cpu=isinstance(self.machine, CpuMachine),
        )
        return say(
            "handoff",
            requests=len(prompts),
            loaded_tokens=decode.num_loaded,
            same_first_tokens=prefill.tokens == [tokens[:1] for tokens in expected],
            same_tokens=decode.tokens == [tokens[1:] for tokens in expected],
            mib=round(prefill.num_bytes / 2**20, 2),
            gb_per_s=round(prefill.num_bytes / max(prefill.push_s, 1e-9) / 1e9, 3),
        )

    def _generate(self, prompt: Sequence[int]) -> list[int]:
        """In this process: the prompt in one step, then token by token."""
        plan, length = self.plan, len(prompt)
        num_blocks = -(-(length + plan.num_tokens) // plan.block_size)
        cache = kv_cache_on(self.machine, self.model, 1 + num_blocks, plan.block_size)
        runner = self.machine.runner(self.model, cache, LIMITS, graphs=False)
        step = prefill_step(prompt, plan.block_size, plan.num_tokens)
        tokens = [*runner.launch(step).result().sampled_token_ids["r0"]]
        while len(tokens) < plan.num_tokens:
            step = next_step(1, length + len(tokens))
            tokens += runner.launch(step).result().sampled_token_ids["r0"]
        return tokens


def hand_off(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    block_size: int,
    cpu: bool = False,
) -> tuple[Outcome, Outcome]:
    """What P and D say, in two processes, of these prompts one after the other."""
    num_blocks = 1 + 2 * -(-LIMITS.max_model_len // block_size)
    extra = ["--cpu"] if cpu else []
    sizes = [str(block_size), str(num_blocks)]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks._gpu_node", role, str(directory), *sizes, *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for role in ("prefill", "decode")
    ]
    try:
        endpoints = [_line(node) for node in nodes]
        for node, peer in zip(nodes, reversed(endpoints), strict=True):
            order = Order(peer, [list(prompt) for prompt in prompts], num_tokens)
            _tell(node, json.dumps(asdict(order)))
        prefill, decode = (Outcome(**json.loads(_line(node))) for node in nodes)
        for node in nodes:
            _tell(node, "")
            node.wait(30)
        return prefill, decode
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


def _line(node: subprocess.Popen[str]) -> str:
    assert node.stdout is not None
    line = node.stdout.readline()
    assert line, "a node has ended before its time"
    return line.strip()


def _tell(node: subprocess.Popen[str], line: str) -> None:
    assert node.stdin is not None
    node.stdin.write(line + "\n")
    node.stdin.flush()


def find_model(given: Path | None, scratch: Path, machine: Machine) -> Path:
    """The given one, the built-in one if it is here, or one that is made."""
    if given is not None:
        return given
    if isinstance(machine, CpuMachine):
        return write_random_model(scratch, TINY)
    cached = sorted(BUILTIN.glob("smollm2-135m/*/config.json"))
    if cached:
        return cached[0].parent
    return write_random_model(scratch, MEDIUM, machine.device)


def measure(machine: Machine, directory: Path, plan: Plan) -> None:
    bench = Bench(machine, directory, plan)
    bench.limits()
    bench.prefill()
    bench.handoff()
    bench.decode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", action="store_true", help="as all benchmarks; it always does")
    options = parser.parse_args()
    if options.dry_run:
        machine: Machine = CpuMachine()
    else:
        try:
            machine = CudaMachine(attention=options.attention)
        except ConfigError as error:
            say("limits", left_out=str(error))
            return
    with tempfile.TemporaryDirectory() as scratch:
        directory = find_model(options.model, Path(scratch), machine)
        measure(machine, directory, TRIAL if options.dry_run else Plan())


if __name__ == "__main__":
    main()
