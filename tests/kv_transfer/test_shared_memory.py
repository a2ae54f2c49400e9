from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import PeerRefused
from kv_transfer.memory_limits import MemoryLimit, tightest_limit
from kv_transfer.shared_memory import SharedMemory
from protocol import ConfigError

SIZE = 3 * 4096 + 100


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert "memfd:kvrelay" not in Path("/proc/self/maps").read_text()
    assert not [fd for fd in os.listdir("/proc/self/fd") if leads_to_memory(fd)]


def leads_to_memory(fd: str) -> bool:
    try:
        return "memfd:kvrelay" in os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return False


def test_two_mappings_are_one_memory() -> None:
    ours = SharedMemory.create(SIZE)
    theirs = SharedMemory.attach(os.dup(ours.fd), SIZE)
    assert bytes(ours.buffer) == bytes(SIZE)
    np.frombuffer(ours.buffer, np.uint8)[:] = 7
    assert ctypes.string_at(theirs.address, SIZE) == b"\7" * SIZE
    theirs.buffer[SIZE - 1] = 9
    assert ctypes.string_at(ours.address + SIZE - 1, 1) == b"\11"
    assert ours.num_bytes == theirs.num_bytes == SIZE
    assert not os.get_inheritable(ours.fd)


def test_what_is_made_from_it_keeps_it() -> None:
    array = np.frombuffer(SharedMemory.create(SIZE).buffer, np.uint8)
    gc.collect()
    array[:] = 3
    assert set(array) == {3}


def test_nobody_can_change_its_size() -> None:
    memory = SharedMemory.create(SIZE)
    for size in (0, SIZE - 1, SIZE + 1, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_closed_nobody_else_can_map_it() -> None:
    memory = SharedMemory.create(SIZE)
    memory.close()
    memory.close()
    assert memory.fd == -1
    memory.buffer[0] = 1


@pytest.mark.parametrize(
    ("seals", "size", "problem"),
    [
        (0, SIZE, "not sealed"),
        (fcntl.F_SEAL_GROW, SIZE, "not sealed"),
        (fcntl.F_SEAL_SHRINK, SIZE - 1, f"has {SIZE - 1} bytes, but its pool {SIZE}"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, SIZE, "cannot be mapped"),
    ],
)
def test_memory_that_could_kill_us_is_refused(seals: int, size: int, problem: str) -> None:
    fd = os.memfd_create("kvrelay-of-a-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(PeerRefused, match=problem):
        SharedMemory.attach(fd, SIZE)


def test_a_file_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(SIZE))
    with pytest.raises(PeerRefused, match="cannot be mapped"):
        SharedMemory.attach(os.open(tmp_path / "file", os.O_RDWR), SIZE)


def test_forks_do_not_inherit_it() -> None:
    program = (
        "import os\n"
        "from kv_transfer.shared_memory import SharedMemory\n"
        "memory = SharedMemory.create(4096)\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'memfd:kvrelay' in maps\n"
        "if os.fork() == 0:\n"
        "    maps = open('/proc/self/maps').read()\n"
        "    os._exit('memfd:kvrelay' in maps)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---------------------------------------------------------------------- too much


def test_more_than_there_is() -> None:
    size = 1 << 50
    with pytest.raises(ConfigError) as caught:
        SharedMemory.create(size)
    assert caught.value.field == "kv_memory_bytes"
    assert f"{size} bytes of shared memory are needed" in caught.value.problem
    assert "leaves" in caught.value.problem


@pytest.mark.parametrize("kind", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_limits_of_the_process(kind: str) -> None:
    program = (
        "import resource, sys\n"
        "from kv_transfer.shared_memory import SharedMemory\n"
        "from protocol import ConfigError\n"
        f"resource.setrlimit(resource.{kind}, (3 << 30, 3 << 30))\n"
        "SharedMemory.create(1 << 20)\n"
        "try:\n"
        "    SharedMemory.create((3 << 30) + 1, field='cache.kv_memory')\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"cache.kv_memory: {(3 << 30) + 1} bytes of shared memory")
    assert f"{kind} (ulimit" in done.stdout


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def limit_in(root: Path, membership: str, files: dict[str, str]) -> MemoryLimit:
    proc = write_tree(
        root / "proc", {"meminfo": "MemAvailable: 5000000 kB\n", "self/cgroup": membership}
    )
    return tightest_limit(proc, write_tree(root / "cgroups", {"present": "", **files}))


V2 = "0::/a/b\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/a\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "available"),
    [
        (V2, {}, 5_000_000 << 10),
        (V2, {"a/b/memory.max": "max\n", "a/b/memory.current": "1"}, 5_000_000 << 10),
        (V2, {"a/b/memory.max": "900\n", "a/b/memory.current": "200\n"}, 700),
        (V2, {"a/memory.max": "900\n", "a/memory.current": "200\n"}, 700),
        (V2, {"memory.max": "900\n", "memory.current": "200\n"}, 700),
        (V2, {"a/b/memory.max": "900", "a/b/memory.current": "1000"}, 0),
        (
            V2,
            {
                "a/b/memory.max": "900",
                "a/b/memory.current": "800",
                "a/b/memory.stat": "anon 5\ninactive_file 300\n",
            },
            400,
        ),
        (
            V1,
            {
                "memory/a/memory.limit_in_bytes": "900",
                "memory/a/memory.usage_in_bytes": "100",
            },
            800,
        ),
        (
            V1,
            {
                "memory/a/memory.limit_in_bytes": "9223372036854771712",
                "memory/a/memory.usage_in_bytes": "100",
            },
            5_000_000 << 10,
        ),
    ],
)
def test_limits_of_groups(
    tmp_path: Path, membership: str, files: dict[str, str], available: int
) -> None:
    found = limit_in(tmp_path, membership, files)
    assert found.available == available
    assert ("cgroup" in found.what) == (available < 5_000_000 << 10)


def test_this_system_has_some_memory() -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert tightest_limit().available > 1 << 20
