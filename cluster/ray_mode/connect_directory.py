"""The directory of a cluster on Ray, as its processes see it."""

from __future__ import annotations

from cluster.connect_directory import start_directory
from cluster.directory_config import DirectoryAddress
from cluster.ray_mode.spec import Spec
from directory import RedisDirectory


def follow_directory(
    spec: Spec, address: DirectoryAddress, *, need_server: bool = False
) -> RedisDirectory:
    """For one who reads. Raises as `start_directory` does."""
    return start_directory(spec.directory, spec.name, address, need_server=need_server)


def tell_directory(spec: Spec, address: DirectoryAddress) -> RedisDirectory:
    """For one who only tells, such as a node. Raises as `start_directory` does."""
    return start_directory(spec.directory, spec.name, address, follow=False)
