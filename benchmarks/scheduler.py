"""What a step of the scheduler costs, without a model.

    python benchmarks/scheduler.py [--peers DIR] [--rounds N] [--json]

decode_256            256 requests decoding, 64 prompt tokens each
admit_64_prefix       64 prompts of 8,192 tokens, 90 % of them cached, admitted in one step
hash_8192             building one request of 8,192 tokens, block hashes included
running_8_waiting_N   8 running, all seats taken, with 0 and with 20,000 waiting
preempting            128 requests in a pool that holds about a third of them

Each figure is the median time of one `schedule` plus one `update_from_output`. With `--peers`, the
folder in which the peer comparison was set up, vLLM's own scheduler runs the same workloads in
turns with ours, each run in a process of its own; the reference is the median of its runs.
Otherwise the reference is a loop that does the least that any scheduler has to do.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._result import Result, report
from protocol import SamplingParams
from scheduler import CacheConfig, ModelRunnerOutput, Request, Scheduler, SchedulerConfig

BLOCK = 16
MAX_LEN = 16_384
TOKEN = (7,)
PEER_SCRIPT = Path(__file__).resolve().parents[2] / "shared" / "peers" / "scheduler_vllm.py"
PEER_TIMEOUT_S = 600

Times = dict[str, float]  # µs of a step, by workload


def build(max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_LEN,
        ),
        CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
    )


def request(name: str, prompt: list[int], max_tokens: int, at: float) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), arrival_time=at)


def step_us(scheduler: Scheduler) -> float:
    """The time of one step; what the runner does between its halves is not counted."""
    began = time.perf_counter()
    step = scheduler.schedule()
    scheduled = time.perf_counter()
    requests = scheduler.requests
    sampled = {
        request_id: TOKEN
        for request_id in step.num_scheduled_tokens
        if requests[request_id].num_computed_tokens >= requests[request_id].num_tokens
    }
    output = ModelRunnerOutput(sampled)
    resumed = time.perf_counter()
    scheduler.update_from_output(step, output)
    return (time.perf_counter() - resumed + scheduled - began) * 1e6


# ---------------------------------------------------------------------- ours


def decode_256() -> list[float]:
    scheduler = build(256, 32_768, 20_000)
    for i in range(256):
        prompt = [100 + (i * 7 + j) % 1000 for j in range(64)]
        scheduler.add_request(request(f"d{i}", prompt, 400, float(i)))
    step_us(scheduler)
    return [step_us(scheduler) for _ in range(200)]


def admit_64_prefix() -> list[float]:
    times = []
    shared = [5 + j % 997 for j in range(7376)]
    for _ in range(5):
        scheduler = build(65, 65_536, 60_000)
        scheduler.add_request(request("warm", shared + [3] * 16, 1, 0.0))
        step_us(scheduler)
        for i in range(64):
            scheduler.add_request(request(f"p{i}", shared + [2000 + i] * 816, 4, 1.0 + i))
        times.append(step_us(scheduler))
        assert len(scheduler.running) == 64
        assert scheduler.stats.prefix_hits == 64 * 7376
    return times


def hash_8192() -> list[float]:
    times = []
    for i in range(20):
        prompt = [i + j % 997 for j in range(8192)]
        began = time.perf_counter()
        request(f"h{i}", prompt, 4, 0.0)
        times.append((time.perf_counter() - began) * 1e6)
    return times


def running_8(num_waiting: int) -> list[float]:
    scheduler = build(8, 2048, 20_000)
    for i in range(8):
        scheduler.add_request(request(f"r{i}", [9 + j for j in range(32)], 1000, float(i)))
    step_us(scheduler)
    for i in range(num_waiting):
        scheduler.add_request(request(f"w{i}", [11] * 16, 8, 10.0 + i))
    return [step_us(scheduler) for _ in range(200)]


def preempting() -> list[float]:
    scheduler = build(128, 8192, 900)
    for i in range(128):
        prompt = [13 + (i * 31 + j) % 1500 for j in range(200)]
        scheduler.add_request(request(f"k{i}", prompt, 200, float(i)))
    times = [step_us(scheduler) for _ in range(300)]
    assert scheduler.stats.num_preemptions > 0
    return times


WORKLOADS: dict[str, Callable[[], list[float]]] = {
    "decode_256": decode_256,
    "admit_64_prefix": admit_64_prefix,
    "hash_8192": hash_8192,
    "running_8_waiting_0": lambda: running_8(0),
    "running_8_waiting_20000": lambda: running_8(20_000),
    "preempting": preempting,
}


def run_workloads() -> Times:
    return {name: statistics.median(run()) for name, run in WORKLOADS.items()}


# ---------------------------------------------------------------------- what it is compared with


def floor() -> Times:
    """The least that must happen: a token appended and a stop tested for each request; a look-up
    for each cached block; a hash for each block of a prompt.
    """
    outputs: list[list[int]] = [[] for _ in range(256)]
    hashes = [index.to_bytes(16, "little") for index in range(461)]
    cached = {block_hash: index for index, block_hash in enumerate(hashes)}
    prompt = [j % 997 for j in range(8192)]

    def decode(count: int) -> None:
        for output in outputs[:count]:
            output.append(7)
            if len(output) >= MAX_LEN or output[-1] == 2:
                raise AssertionError

    def admit() -> None:
        for _ in range(64):
            list(map(cached.get, hashes))

    def hash_all() -> None:
        data, parent = array("I", prompt).tobytes(), b"0" * 16
        for offset in range(0, len(data), 64):
            parent = hashlib.blake2b(parent + data[offset : offset + 64]).digest()[:16]

    return {
        "decode_256": _median_us(lambda: decode(256)),
        "admit_64_prefix": _median_us(admit),
        "hash_8192": _median_us(hash_all),
        "running_8_waiting_0": _median_us(lambda: decode(8)),
        "running_8_waiting_20000": _median_us(lambda: decode(8)),
        "preempting": _median_us(lambda: decode(64)),
    }


def _median_us(work: Callable[[], None]) -> float:
    times = []
    for _ in range(50):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def run_vllm(peers: Path) -> Times:
    """The same workloads through vLLM's own scheduler, in an environment of its own."""
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [peers / "vllm-venv" / "bin" / "python", PEER_SCRIPT]
    return _read_times(command, environment)


def run_ours() -> Times:
    return _read_times([sys.executable, __file__, "--worker"], dict(os.environ))


def _read_times(command: Sequence[str | Path], environment: dict[str, str]) -> Times:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PEER_TIMEOUT_S, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["workload"]: line["step_us"] for line in lines if "workload" in line}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", type=Path, help="where vLLM is installed in vllm-venv")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if options.worker:
        for name, value in run_workloads().items():
            print(json.dumps({"workload": name, "step_us": value}))
        return
    ours, others = [], []
    for _ in range(options.rounds):
        ours.append(run_ours())
        others.append(floor() if options.peers is None else run_vllm(options.peers))
    report(
        [
            Result(
                name,
                statistics.median(times[name] for times in ours),
                "us",
                statistics.median(times[name] for times in others),
                "the least possible" if options.peers is None else "vLLM's",
            )
            for name in WORKLOADS
        ]
    )


if __name__ == "__main__":
    main()
