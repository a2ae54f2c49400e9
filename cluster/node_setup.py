"""What a process does to become a node: its log, its cores, and the node from its setup."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import cast

from cluster.config import LocalConfig
from cluster.engine_node import EngineNode
from cluster.node_builder import NodeBuilder
from cluster.node_compute import RunnerFactory
from cluster.node_messages import Setup
from cluster.transports import make_transport
from engine import Listener
from engine.weights import ModelFiles
from kv_transfer import MemoryHub
from protocol import ConfigError

ComputeMaker = Callable[[ModelFiles, LocalConfig], RunnerFactory]


def set_up_logging(name: str, level: int) -> None:
    """Each line says whose it is: the logs of several processes come together."""
    who = name.replace("%", "%%")
    logging.basicConfig(
        level=level,
        format=f"%(asctime)s %(levelname)s {who} %(name)s: %(message)s",
        force=True,  # whoever has started this process may have set up its own
    )


def use_modules(path: Iterable[str]) -> None:
    """Let Python find what the process that started the cluster would find."""
    sys.path += [entry for entry in path if entry not in sys.path]


def build_node(setup: Setup, listener: Listener) -> EngineNode:
    """Raises ConfigError, ModelError: as `NodeBuilder.build` does."""
    hub = MemoryHub()
    _use_cores(setup)
    builder = NodeBuilder(
        config=setup.config,
        files=setup.files,
        make_compute=_compute_maker(setup)(setup.files, setup.config),
        make_transport=lambda node_id: make_transport(
            setup.config, node_id, hub=hub, token=setup.token.value
        ),
        listener=listener,
        roles_change=setup.roles_change,
    )
    return builder.build(setup.role, setup.node_id, setup.generation)


def _use_cores(setup: Setup) -> None:
    """Before torch is imported: that is when it looks."""
    if setup.cpus is not None:
        try:
            os.sched_setaffinity(0, setup.cpus)
        except OSError as error:
            raise ConfigError("cpus", f"{list(setup.cpus)}: {error.strerror}") from error
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)


def _compute_maker(setup: Setup) -> ComputeMaker:
    use_modules(setup.module_path)
    module, _, name = setup.compute.partition(":")
    return cast(ComputeMaker, getattr(importlib.import_module(module), name))
