"""The packages keep the rules of `tests/architecture.py`, and every rule can be broken."""

import tomllib
from pathlib import Path

import pytest

from tests.architecture import (
    LIGHT_MODULES,
    LIGHT_PACKAGES,
    ROOMS,
    find_violations,
    handed_on,
    heavy_modules,
    loaded_by,
    modules,
    packages,
)

ROOT = Path(__file__).resolve().parents[1]

Files = dict[str, str]


# --- the project ---------------------------------------------------------------------------------


def test_the_project_breaks_no_rule() -> None:
    violations = find_violations(ROOT)
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_the_wheel_ships_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(shipped) == sorted(packages(ROOT))


def test_mypy_checks_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(packages(ROOT)) <= set(project["tool"]["mypy"]["files"])


@pytest.mark.parametrize("package", [name for name in packages(ROOT) if name in LIGHT_PACKAGES])
def test_light_packages_load_nothing_heavy(package: str) -> None:
    loaded = loaded_by(ROOT, modules(ROOT, package))
    assert package in loaded
    assert not loaded & heavy_modules(package)


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_load_neither_torch_nor_ray(module: str) -> None:
    package = module.partition(".")[0]
    assert module in modules(ROOT, package)
    loaded = loaded_by(ROOT, [module])
    assert package in loaded
    assert not loaded & {"torch", "ray"}


# --- the checker ---------------------------------------------------------------------------------


def write_tree(root: Path, files: Files) -> Path:
    """The given files under `root`, with an `__init__.py` and a `py.typed` in each package."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for package in {name.partition("/")[0] for name in files} & ROOMS.keys():
        (root / package / "__init__.py").touch()
        (root / package / "py.typed").touch()
    return root


SCHEDULER: Files = {
    "scheduler/__init__.py": (
        "from .config import SchedulerConfig\n"
        "from .queue import Queue\n"
        "__all__ = ['SchedulerConfig']\n"
        "__all__ += ['Queue']\n"
    ),
    "scheduler/config.py": "class SchedulerConfig: ...\nclass Detail: ...\n",
    "scheduler/queue.py": "class Queue: ...\n",
}
OFFLOAD: Files = {
    "kv_transfer/offload/__init__.py": "from kv_transfer.offload.host import HostTier\n",
    "kv_transfer/offload/host.py": "class HostTier: ...\n",
}

ALLOWED: Files = {
    **SCHEDULER,
    **OFFLOAD,
    "protocol/request.py": "import msgspec\nfrom . import errors\n",
    "protocol/errors.py": "import os.path\n",
    "telemetry/metrics.py": "import prometheus_client\nfrom protocol.request import Request\n",
    "directory/redis.py": "import redis\nimport time\n",
    "scheduler/replay.py": "import os\nfrom pathlib import Path\nopen('steps')\nprint(1)\n",
    "scheduler/core.py": "from .config import Detail\nfrom scheduler.queue import Queue\n",
    "engine/runner.py": (
        "import torch\n"
        "from scheduler import SchedulerConfig\n"
        "from scheduler.config import Detail\n"
        "from scheduler import config\n"
        "from kv_transfer.offload import HostTier\n"
        "config.Detail\n"
        "SchedulerConfig.Queue\n"
        "model.eval()\n"
        "torch.load('x', weights_only=True)\n"
    ),
    "router/view.py": "import directory\nimport engine.runner\n",
    "gateway/app.py": "import fastapi\nimport starlette.requests\nimport uvicorn\nimport router\n",
    "cluster/actors.py": (
        "import os\n"
        "import ray\n"
        "import uvicorn\n"
        "from gateway import app\n"
        "os.environ['NET_DEVICES'] = 'lo'\n"
        "del os.environ['NET_DEVICES']\n"
    ),
    "simulation/clock.py": "import scheduler\nimport router\n",
    "kvrelay/cli.py": "import os\nimport cluster\nimport simulation\nhome = os.environ['HOME']\n",
    "benchmarks/steps.py": "import time\nimport torch\nfrom scheduler import Queue\nprint(1)\n",
}


def test_what_is_allowed_is_no_violation(tmp_path: Path) -> None:
    assert find_violations(write_tree(tmp_path, ALLOWED)) == []


BROKEN = {
    # Layers.
    "upward": (
        {"scheduler/core.py": "import engine\n", "engine/loop.py": ""},
        "scheduler/core.py:1: imports engine, which is above scheduler",
    ),
    "upward_from_the_bottom": (
        {"protocol/request.py": "from telemetry import count\n"},
        "protocol/request.py:1: imports telemetry, which is above protocol",
    ),
    "sideways_in_layer_2": (
        {"kv_transfer/lease.py": "\n\nfrom scheduler.block_pool import BlockPool\n"},
        "kv_transfer/lease.py:3: imports scheduler, which shares the layer of kv_transfer",
    ),
    "sideways_in_layer_2_again": (
        {"directory/events.py": "import kv_transfer.wire as wire\n"},
        "directory/events.py:1: imports kv_transfer, which shares the layer of directory",
    ),
    "sideways_in_layer_4": (
        {"prefill_node/node.py": "import decode_node.intake\n"},
        "prefill_node/node.py:1: imports decode_node, which shares the layer of prefill_node",
    ),
    "sideways_in_layer_4_again": (
        {"decode_node/node.py": "from router import choose\n"},
        "decode_node/node.py:1: imports router, which shares the layer of decode_node",
    ),
    "sideways_in_layer_6": (
        {"simulation/cluster.py": "from cluster import Deployment\n"},
        "simulation/cluster.py:1: imports cluster, which shares the layer of simulation",
    ),
    "telemetry_knows_only_protocol": (
        {"telemetry/metrics.py": "from scheduler import Scheduler\n"},
        "telemetry/metrics.py:1: imports scheduler, which is above telemetry",
    ),
    "inside_a_function": (
        {"router/view.py": "def view() -> None:\n    import gateway\n"},
        "router/view.py:2: imports gateway, which is above router",
    ),
    "for_type_checking": (
        {"router/view.py": "if TYPE_CHECKING:\n    from gateway import App\n"},
        "router/view.py:2: imports gateway, which is above router",
    ),
    "by_name_at_run_time": (
        {"router/view.py": "import importlib\nimportlib.import_module('gateway.app')\n"},
        "router/view.py:2: imports gateway, which is above router",
    ),
    "in_an_inner_package": (
        {"kv_transfer/transports/memory.py": "import engine\n"},
        "kv_transfer/transports/memory.py:1: imports engine, which is above kv_transfer",
    ),
    # Modules that a package never imports.
    **{
        f"{package}_never_imports_{module}": (
            {f"{package}/core.py": f"import {module}\n"},
            f"{package}/core.py:1: imports {module}, which {package} never does",
        )
        for package, module in (
            ("protocol", "torch"),
            ("telemetry", "torch"),
            ("directory", "torch"),
            ("scheduler", "torch"),
            ("scheduler", "asyncio"),
            ("scheduler", "time"),
            ("scheduler", "datetime"),
            ("kv_transfer", "torch"),
            ("engine", "redis"),
            ("router", "torch"),
            ("gateway", "torch"),
            ("simulation", "torch"),
        )
    },
    "never_an_inner_module": (
        {"gateway/app.py": "from torch.nn import Module\n"},
        "gateway/app.py:1: imports torch, which gateway never does",
    ),
    "time_even_where_io_is_allowed": (
        {"scheduler/replay.py": "import time\n"},
        "scheduler/replay.py:1: imports time, which scheduler never does",
    ),
    # Modules that only some packages import.
    **{
        f"{package}_does_not_own_{module}": (
            {f"{package}/core.py": f"import {module}\n"},
            f"{package}/core.py:1: imports {module}, which only {owner} may",
        )
        for package, module, owner in (
            ("engine", "ray", "cluster"),
            ("gateway", "ray", "cluster"),
            ("simulation", "ray", "cluster"),
            ("kvrelay", "ray", "cluster"),
            ("cluster", "fastapi", "gateway"),
            ("router", "fastapi", "gateway"),
            ("kvrelay", "fastapi", "gateway"),
            ("cluster", "starlette", "gateway"),
            ("kvrelay", "uvicorn", "cluster and gateway"),
        )
    },
    # Input and output in the scheduler.
    "scheduler_imports_os": (
        {"scheduler/core.py": "from os import path\n"},
        "scheduler/core.py:1: imports os: I/O in the scheduler",
    ),
    "scheduler_opens_a_file": (
        {"scheduler/core.py": "open('steps')\n"},
        "scheduler/core.py:1: calls open(): I/O in the scheduler",
    ),
    "scheduler_prints": (
        {"scheduler/inner/replay.py": "print(1)\n"},
        "scheduler/inner/replay.py:1: calls print(): I/O in the scheduler",
    ),
    # Names that a package hands on.
    "inner_name": (
        {**SCHEDULER, "engine/loop.py": "from scheduler.config import Detail, SchedulerConfig\n"},
        "engine/loop.py:1: takes SchedulerConfig from scheduler.config, "
        "though scheduler hands it on",
    ),
    "inner_name_listed_later": (
        {**SCHEDULER, "engine/loop.py": "from scheduler.queue import Queue\n"},
        "engine/loop.py:1: takes Queue from scheduler.queue, though scheduler hands it on",
    ),
    "inner_name_through_a_module": (
        {**SCHEDULER, "engine/loop.py": "import scheduler.queue\nscheduler.queue.Queue()\n"},
        "engine/loop.py:2: takes Queue from scheduler.queue, though scheduler hands it on",
    ),
    "inner_name_through_an_alias": (
        {**SCHEDULER, "engine/loop.py": "import scheduler.queue as q\nq.Queue()\n"},
        "engine/loop.py:2: takes Queue from scheduler.queue, though scheduler hands it on",
    ),
    "inner_name_through_an_imported_module": (
        {**SCHEDULER, "engine/loop.py": "from scheduler import queue\nqueue.Queue()\n"},
        "engine/loop.py:2: takes Queue from scheduler.queue, though scheduler hands it on",
    ),
    "inner_name_of_an_inner_package": (
        {**OFFLOAD, "engine/loop.py": "from kv_transfer.offload.host import HostTier\n"},
        "engine/loop.py:1: takes HostTier from kv_transfer.offload.host, "
        "though kv_transfer.offload hands it on",
    ),
    "inner_name_in_a_benchmark": (
        {**SCHEDULER, "benchmarks/steps.py": "from scheduler.queue import Queue\n"},
        "benchmarks/steps.py:1: takes Queue from scheduler.queue, though scheduler hands it on",
    ),
    # Code that a peer or a file could take over.
    "pickle": (
        {"kv_transfer/wire.py": "import pickle\n"},
        "kv_transfer/wire.py:1: imports pickle",
    ),
    "from_pickle": (
        {"benchmarks/steps.py": "from pickle import loads\n"},
        "benchmarks/steps.py:1: imports pickle",
    ),
    "eval": (
        {"cluster/config.py": "eval('1 + 1')\n"},
        "cluster/config.py:1: calls eval()",
    ),
    "exec": (
        {"cluster/config.py": "exec('x = 1')\n"},
        "cluster/config.py:1: calls exec()",
    ),
    "numpy_pickle": (
        {"kv_transfer/wire.py": "numpy.load(file, allow_pickle=True)\n"},
        "kv_transfer/wire.py:1: passes allow_pickle other than False",
    ),
    "torch_pickle": (
        {"engine/weights.py": "torch.load(file, weights_only=chosen)\n"},
        "engine/weights.py:1: passes weights_only other than True",
    ),
    # The environment.
    "environ": (
        {"engine/kernels.py": "import os\nos.environ['CXX']\n"},
        "engine/kernels.py:2: reads the environment, which only kvrelay does",
    ),
    "environ_get": (
        {"engine/kernels.py": "import os as system\nsystem.environ.get('CXX')\n"},
        "engine/kernels.py:2: reads the environment, which only kvrelay does",
    ),
    "getenv": (
        {"cluster/config.py": "import os\nos.getenv('PORT')\n"},
        "cluster/config.py:2: reads the environment, which only kvrelay does",
    ),
    "imported_environ": (
        {"cluster/config.py": "from os import environ\n"},
        "cluster/config.py:1: reads the environment, which only kvrelay does",
    ),
    # Files and packages.
    **{
        f"module_named_{name}": (
            {f"router/{name}.py": ""},
            f"router/{name}.py:0: a module named {name} says nothing",
        )
        for name in ("utils", "common", "helpers")
    },
    "inner_package_named_utils": (
        {"router/utils/scores.py": ""},
        "router/utils/scores.py:0: a module named utils says nothing",
    ),
    "unknown_package": (
        {"tools/__init__.py": ""},
        "tools:0: is a package that no layer is given for",
    ),
    "no_syntax": (
        {"router/view.py": "def\n"},
        "router/view.py:1: does not parse",
    ),
}


@pytest.mark.parametrize(("files", "violation"), BROKEN.values(), ids=BROKEN)
def test_each_broken_rule_is_reported(tmp_path: Path, files: Files, violation: str) -> None:
    assert [str(found) for found in find_violations(write_tree(tmp_path, files))] == [violation]


def test_a_package_without_py_typed_is_reported(tmp_path: Path) -> None:
    write_tree(tmp_path, {"router/view.py": ""})
    (tmp_path / "router/py.typed").unlink()
    assert [str(found) for found in find_violations(tmp_path)] == ["router:0: has no py.typed"]


def test_relative_imports_stay_in_their_package(tmp_path: Path) -> None:
    files = {
        "kv_transfer/engine.py": "from . import gateway\nfrom .gateway import app\n",
        "kv_transfer/offload/__init__.py": "from .router import a\nfrom ..engine import b\n",
        "kv_transfer/offload/router.py": "from ..engine import b\nfrom .. import engine\n",
    }
    assert find_violations(write_tree(tmp_path, files)) == []


@pytest.mark.parametrize(
    ("init", "names"),
    [
        pytest.param("from .a import A, B\n__all__ = ['A']\n", {"A"}, id="listed"),
        pytest.param("__all__: list[str] = ['A']\n", {"A"}, id="annotated"),
        pytest.param("__all__ = ('A',)\n__all__ += ('B',)\n", {"A", "B"}, id="extended"),
        pytest.param("from .a import A as C\n", {"C"}, id="imported"),
        pytest.param("", set(), id="nothing"),
    ],
)
def test_handed_on_names(tmp_path: Path, init: str, names: set[str]) -> None:
    write_tree(tmp_path, {"router/__init__.py": init})
    assert handed_on(tmp_path, "router") == names


# Stands in for a large package: to be found, it must only be imported.
FAKE_TORCH: Files = {"torch.py": "", "third_party.py": "import torch\n"}


def test_an_import_of_torch_by_a_third_party_is_seen(tmp_path: Path) -> None:
    files = {**FAKE_TORCH, "router/view.py": "import third_party\n"}
    write_tree(tmp_path, files)
    assert find_violations(tmp_path) == []
    loaded = loaded_by(tmp_path, modules(tmp_path, "router"))
    assert loaded & heavy_modules("router") == {"torch"}


def test_an_import_of_torch_through_a_lower_package_is_seen(tmp_path: Path) -> None:
    files = {
        **FAKE_TORCH,
        "router/policies/affinity.py": "from engine import runner\n",
        "engine/runner.py": "import torch\n",
    }
    write_tree(tmp_path, files)
    loaded = loaded_by(tmp_path, modules(tmp_path, "router"))
    assert loaded & heavy_modules("router") == {"torch"}


def test_a_light_module_is_looked_at_alone(tmp_path: Path) -> None:
    files = {**FAKE_TORCH, "engine/loop.py": "", "engine/runner.py": "import torch\n"}
    write_tree(tmp_path, files)
    assert "torch" not in loaded_by(tmp_path, ["engine", "engine.loop"])
    assert "torch" in loaded_by(tmp_path, ["engine.runner"])


def test_a_module_of_a_missing_extra_is_passed_over(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cluster/actors.py": "import nixl.not_there\n"})
    assert "cluster" in loaded_by(tmp_path, ["cluster.actors"])


def test_any_other_missing_module_is_an_error(tmp_path: Path) -> None:
    write_tree(tmp_path, {"cluster/actors.py": "import not_there\n"})
    with pytest.raises(ImportError, match="not_there"):
        loaded_by(tmp_path, ["cluster.actors"])


def test_fastapi_is_heavy_except_for_the_gateway() -> None:
    assert "fastapi" in heavy_modules("router")
    assert "fastapi" not in heavy_modules("gateway")
    assert "ray" in heavy_modules("gateway")
