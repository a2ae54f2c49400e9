"""How long a user waits: from the command to the first token, with the model in the cache.

    python benchmarks/start.py [--json]

`kvrelay serve` is started again and again, in one process and with one for each node, and asked as
soon as it answers. The reference is the limit of 8 s.
"""

import itertools
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks._clusters import model_files
from benchmarks._result import Result, report
from cluster.free_port import free_port

KVRELAY = Path(sys.executable).with_name("kvrelay")
LIMIT_S = 8.0
GIVE_UP_S = 60.0
POLL_S = 0.01  # the resolution of what is measured
REPEATS = 5
BODY = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 1}


@contextmanager
def served(port: int, *options: str) -> Iterator[None]:
    command = [str(KVRELAY), "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(GIVE_UP_S)


def first_token_s(*options: str) -> float:
    """Seconds from the command to the answer."""
    port = free_port("127.0.0.1")
    began = time.perf_counter()
    with served(port, *options):
        while time.perf_counter() < began + GIVE_UP_S:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=BODY)
            except httpx.TransportError:  # it does not listen yet
                time.sleep(POLL_S)
                continue
            answer.raise_for_status()
            return time.perf_counter() - began
    raise TimeoutError(f"no token within {GIVE_UP_S:.0f} s")


def main() -> None:
    model_files()  # fetched and converted, if it never was
    ways = {"first_token": (), "first_token_processes": ("--processes",)}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for (name, options), _ in itertools.product(ways.items(), range(REPEATS)):
        times[name].append(first_token_s(*options))
    report(
        [
            Result(name, statistics.median(seconds), "s", LIMIT_S, "the limit")
            for name, seconds in times.items()
        ]
    )


if __name__ == "__main__":
    main()
