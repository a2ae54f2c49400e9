"""What to serve, and how: what the command line says, then what the file says, then defaults.

kvrelay serve --config cluster.yaml --max-num-seqs 8
              ─────────┬─────────── ───────┬────────
                    ClusterFile ◄── over it, by its place: scheduler.max_num_seqs
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from cluster import Topology
from cluster.file import ClusterFile, named_by_place
from cluster.yaml_file import YamlFile
from protocol import ConfigError
from scheduler import SchedulerKnobs

# The option of each setting that has one, by its place in the file. A knob's has the knob's name.
OPTIONS: Mapping[str, str] = {
    **{f"scheduler.{knob.name}": knob.name for knob in fields(SchedulerKnobs)},
    "scheduler.policy": "scheduling_policy",
    "model": "model",
    "topology": "topology",
    "processes": "processes",
    "prefill.count": "prefill",
    "decode.count": "decode",
    "unified.count": "unified",
    "cache.block_size": "block_size",
    "cache.kv_memory": "kv_memory",
    "cache.enable_prefix_caching": "prefix_caching",
    "max_model_len": "max_model_len",
    "prefill.threads": "threads",
    "decode.threads": "threads",
    "unified.threads": "threads",
    "engine.device": "device",
    "engine.dtype": "dtype",
    "engine.kv_cache_dtype": "kv_cache_dtype",
    "engine.quantization": "quantization",
    "engine.kernels": "kernels",
    "engine.attention": "attention",
    "engine.batch_invariant": "batch_invariant",
    "transfer.transport": "transport",
    "transfer.layerwise": "layerwise",
    "transfer.checksums": "checksums",
    "transfer.on_transfer_failure": "on_transfer_failure",
    "router.policy": "policy",
    "gateway.host": "host",
    "gateway.port": "port",
}


@dataclass(frozen=True)
class Deployment:
    """The settings, and who is to blame for each."""

    settings: ClusterFile
    file: YamlFile | None
    given: frozenset[str]  # places of what the command line says
    named: frozenset[str] = frozenset()  # of those, the ones that were given by their place

    @classmethod
    def read(
        cls,
        path: Path | None,
        options: Mapping[str, object],
        places: Mapping[str, object] | None = None,
        *,
        path_option: str | None = None,
    ) -> Deployment:
        """Take the settings of a file, if there is one, and over them these options.

        `places`: settings that were given by their place in the file. `path_option`: the option
        that the path was given by, which is at fault if nothing can be read there.

        Raises:
            ConfigError: the file or an option is wrong.
        """
        file = None if path is None else _read(path, path_option)
        settings = ClusterFile() if file is None else file.parse(ClusterFile)
        given = {place: options[name] for place, name in OPTIONS.items() if name in options}
        named = frozenset(places or ())
        given |= places or {}
        deployment = cls(settings, file, frozenset(given), named)
        with deployment.blaming():
            settings = settings.with_settings(given)
            if settings.topology is Topology.UNIFIED and "prefill.count" in given:
                raise ConfigError(
                    "prefill.count", "a unified cluster has none; --decode is its number of nodes"
                )
        return cls(settings, file, frozenset(given), named)

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """A ConfigError names the option, or the line of the file, that the setting is from."""
        try:
            with named_by_place():
                yield
        except ConfigError as error:
            place = error.field
            if place in self.named:
                raise ConfigError("set", f"{place}: {error.problem}") from error
            if place in OPTIONS and (self.file is None or place in self.given):
                raise ConfigError(OPTIONS[place], error.problem) from error
            keys = tuple(place.split("."))
            if self.file is None or keys[0] not in ClusterFile.model_fields:
                raise
            raise self.file.error(keys, error.problem) from error


def _read(path: Path, option: str | None) -> YamlFile:
    """If the path is wrong, rather than what is there, its option is named."""
    try:
        return YamlFile.read(path)
    except ConfigError as error:
        if option is not None and error.field == str(path):
            raise ConfigError(option, str(error)) from error
        raise
