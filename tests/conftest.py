"""What holds for the whole suite."""

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

# As the `kvrelay` command does, and for the same reason; before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# With --hypothesis-profile=patient, those who look for rare orders of events look for longer.
settings.register_profile("patient", max_examples=1500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="run the reference test in every combination of settings, not in a chosen few",
    )
    parser.addoption(
        "--all-faults",
        action="store_true",
        help="walk through every fault with several seeds, and soak for long",
    )


@pytest.fixture(scope="module", autouse=True)
def _old_is_no_garbage() -> None:
    """Many tests collect garbage to see that nothing is left: theirs, and not that of all modules.

    With torch, transformers and all tests in memory, looking at everything takes half a second.
    """
    gc.collect()
    gc.freeze()


# Of libraries: they keep their threads for the next one who needs them.
_LIBRARY_THREADS = ("asyncio_", "ThreadPoolExecutor", "AnyIO worker", "ray_", "tqdm", "Thread-")


@pytest.fixture(scope="module", autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """A module that forgets to stop what it started is at fault, and not the one after it."""
    before = set(threading.enumerate())
    yield
    left = {thread.name for thread in set(threading.enumerate()) - before}
    left = {name for name in left if not name.startswith(_LIBRARY_THREADS)}
    assert not left, f"these threads still run: {sorted(left)}"


# One after the other: they share servers, or each has several processes that compute.
_SERVERS = (
    "tests/e2e/",
    "tests/faults/test_soak_real_model.py",
    "tests/kvrelay/test_serve_processes.py",
)


class _ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """A worker gets whole files, in their order, and all that are about servers, or about Ray."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(_SERVERS):
            return "servers"
        return "ray" if file.startswith(("tests/ray/", "tests/multihost/")) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False
    return _ByFile(config, log)
