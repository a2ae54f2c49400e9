"""Hosts from Ray's own cluster launcher: `ray.launcher` of cluster.yaml, passed through."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from cluster.ray_mode.local_ray import RayFailed
from protocol import ConfigError

_PORT = 6379  # where Ray's examples, and ours, have the head listen


def check_launcher(config: Mapping[str, Any]) -> None:
    """Against Ray's own schema.

    Raises:
        ConfigError: names the part that is wrong.
    """
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    provider = config.get("provider")
    if not isinstance(provider, Mapping) or "type" not in provider:
        raise ConfigError("ray.launcher", "provider: must say a type, such as local or aws")
    try:
        validate_config(prepare_config(dict(config)))
    except ValidationError as error:
        where = ".".join(map(str, error.absolute_path))
        raise ConfigError("ray.launcher", f"{where or 'it'}: {error.message}") from error
    except KeyError as error:
        raise ConfigError("ray.launcher", f"{error.args[0]} is missing") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError("ray.launcher", str(error)) from error


def launch(config: Mapping[str, Any], on_progress: Callable[[str], None]) -> str:
    """Start the hosts, or find those that run; Ray's address on them.

    Raises:
        ConfigError: the configuration is wrong.
        RayFailed: what Ray's launcher says.
    """
    check_launcher(config)
    on_progress(f"starting the hosts of {config.get('cluster_name', 'the Ray cluster')}")
    sdk = _quiet_sdk()
    if config["provider"]["type"] == "local":
        # The second version counts the head as one of the workers, so that one of them is missing.
        os.environ["RAY_UP_enable_autoscaler_v2"] = "0"  # noqa: SIM112 - so is its name
    try:
        sdk.create_or_update_cluster(dict(config), no_config_cache=True)
        head: str = sdk.get_head_node_ip(dict(config))
    except (RuntimeError, OSError, SystemExit) as error:  # it ends the process when ssh fails
        raise RayFailed(f"Ray's launcher has failed: {error}") from error
    return f"{head}:{_PORT}"


def end_hosts(config: Mapping[str, Any]) -> None:
    """Raises RayFailed: what Ray's launcher says."""
    sdk = _quiet_sdk()
    try:
        sdk.teardown_cluster(dict(config))
    except (RuntimeError, OSError, SystemExit) as error:
        raise RayFailed(f"Ray's launcher could not end the hosts: {error}") from error


def _quiet_sdk() -> Any:
    """Ray's launcher, which does not tell each of its commands."""
    from ray.autoscaler import sdk

    sdk.configure_logging(verbosity=0)
    return sdk
