"""A cluster on Ray, as the command line sees it: brought up, asked, changed, taken down."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.config import ServeConfig
from cluster.http_server import bind
from cluster.ray_mode.hosts import NoPlace
from cluster.ray_mode.local_ray import (
    KnownCluster,
    RayFailed,
    StateFile,
    runs,
    start_ray,
    stop_ray,
    use_token_of,
)
from cluster.ray_mode.spec import (
    CONTROLLER,
    Answer,
    ClusterReport,
    Spec,
    namespace,
    pack,
    unpack_or_raise,
)
from protocol import ConfigError, Role

logger = logging.getLogger(__name__)

_POLL_S = 0.25  # so that Ctrl-C is noticed
_CONNECT_TIMEOUT_S = 5.0
_REPORT_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 120.0
_SPARE_CPUS = 1  # of a Ray of our own, for what a user may run beside


class AlreadyRuns(ConfigError):
    """There is a cluster of that name."""

    label = "already_runs"


class RayCluster:
    """A handle on the controller. Made by `up` or by `find`."""

    def __init__(self, known: KnownCluster, state: StateFile) -> None:
        self.known = known
        self._state = state

    # ------------------------------------------------------------------ up and down

    @classmethod
    def up(cls, spec: Spec, state_dir: Path, on_progress: Callable[[str], None]) -> RayCluster:
        """Start everything and return when it serves. If this fails, nothing is left.

        Raises:
            ConfigError, ModelError, NoPlace, RayFailed, NodeLost: what is wrong.
        """
        state = StateFile(state_dir, spec.name)
        _check_not_running(spec.name, state)
        _check_port(spec.serve)
        with contextlib.ExitStack() as on_failure:
            known = _bring_ray(spec, on_progress)
            on_failure.callback(_end_ray, known)
            cluster = cls(known, state)
            on_failure.callback(state.restore, state.read())
            state.write(known)
            cluster._connect()
            on_failure.callback(_disconnect)
            cluster._start(spec, on_progress)
            on_failure.pop_all()
        return cluster

    @classmethod
    def find(cls, name: str, address: str | None, state_dir: Path) -> RayCluster:
        """The one that runs under this name.

        Raises:
            ConfigError: there is none.
            RayFailed: Ray cannot be reached.
        """
        state = StateFile(state_dir, name)
        known = state.read()
        if known is None or address is not None:
            if address is None:
                raise ConfigError(
                    "name",
                    f"no cluster {name!r} was started from here; give --address for one on a Ray "
                    "cluster that is somewhere else",
                )
            known = KnownCluster(name=name, address=address)
        cluster = cls(known, state)
        if known.temp_dir is not None and not runs(known):
            stop_ray(known)
            state.remove()
            raise ConfigError("name", f"cluster {name!r} has ended; what was left is removed now")
        cluster._connect()
        return cluster

    def down(self) -> None:
        """Returns when no process and no file of it is left."""
        controller = self._controller()
        if controller is not None:
            _stop(controller)
            self._kill_all()
        _disconnect()
        _end_ray(self.known)
        self._state.remove()

    def close(self) -> None:
        """Let go of it; it goes on."""
        _disconnect()

    # ------------------------------------------------------------------ questions and orders

    def report(self) -> ClusterReport:
        """Raises ConfigError: no cluster runs there. RayFailed: its controller does not answer."""
        answer = self._ask("report", timeout_s=_REPORT_TIMEOUT_S)
        assert isinstance(answer, ClusterReport), answer
        return answer

    def scale(self, targets: Mapping[Role, int], drain_s: float | None) -> None:
        self._ask("scale", {role.value: count for role, count in targets.items()}, drain_s)

    def drain(self, node_id: str, timeout_s: float | None) -> None:
        self._ask("drain", node_id, timeout_s)

    def undrain(self, node_id: str) -> None:
        self._ask("undrain", node_id)

    def change_role(self, node_id: str, role: Role, drain_s: float | None) -> None:
        self._ask("change_role", node_id, role.value, drain_s)

    def restart(self, names: tuple[str, ...], *, rolling: bool) -> None:
        self._ask("restart", names, rolling)

    def _ask(self, method: str, *args: object, timeout_s: float | None = None) -> Answer:
        controller = self._controller()
        if controller is None:
            raise ConfigError(
                "name", f"no cluster {self.known.name!r} runs on Ray at {self.known.address}"
            )
        try:
            return _ask(controller, method, *args, timeout_s=timeout_s)
        except TimeoutError as error:
            raise RayFailed(f"its controller does not answer: {error}") from error

    # ------------------------------------------------------------------ parts of these

    def _connect(self) -> None:
        use_token_of(self.known)
        connect(self.known.address, self.known.name)

    def _controller(self) -> Any:
        import ray

        with contextlib.suppress(ValueError):
            return ray.get_actor(CONTROLLER, namespace=namespace(self.known.name))
        return None

    def _start(self, spec: Spec, on_progress: Callable[[str], None]) -> None:
        import ray

        from cluster.ray_mode.controller import Controller
        from cluster.ray_mode.places import living_hosts, on_host
        from cluster.ray_mode.preflight import check_bind, check_hosts

        if self._controller() is not None:
            raise AlreadyRuns(
                "name",
                f"a cluster {spec.name!r} runs on Ray at {self.known.address}; choose another name "
                f"or end it with `kvrelay down --name {spec.name}`",
            )
        hosts = living_hosts()
        check_bind(spec, hosts)
        if self.known.temp_dir is None or len(hosts) > 1:
            on_progress(f"looking at {len(hosts)} host{'s' * (len(hosts) > 1)}")
            check_hosts(spec, hosts)
        on_progress("starting nodes and gateways")
        here = ray.get_runtime_context().get_node_id()  # where the first gateway is then, too
        controller = (
            ray.remote(Controller)
            .options(
                name=CONTROLLER,
                namespace=namespace(spec.name),
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
                **on_host(here),
            )
            .remote(pack(spec))
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._kill_all)
            on_failure.callback(_stop, controller)
            _ask(controller, "start", timeout_s=None)
            on_failure.pop_all()

    def _kill_all(self) -> None:
        """The controller, and whatever it may have left."""
        import ray
        from ray.util import list_named_actors

        mine = namespace(self.known.name)
        named = [
            n["name"] for n in list_named_actors(all_namespaces=True) if n["namespace"] == mine
        ]
        for name in sorted(named, key=lambda name: name != CONTROLLER):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=mine), no_restart=True)


def connect(address: str, name: str) -> None:
    """Become a driver of this Ray cluster.

    Raises:
        RayFailed: nobody is there, or does not let us in, or has another version of Ray.
    """
    import ray
    from ray.exceptions import AuthenticationError

    if ray.is_initialized():
        return
    _check_listens(address)
    options: dict[str, Any] = {}
    if address.startswith("127."):  # Ray would look for a process at this machine's outer address
        options["_node_ip_address"] = address.rpartition(":")[0]
    try:
        ray.init(
            address=address,
            namespace=namespace(name),
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise _connection_error(address, error) from error


def _check_listens(address: str) -> None:
    """Ray would go on trying for minutes. Raises RayFailed: nobody listens there."""
    if address == "auto":
        return
    try:
        _dial(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RayFailed(f"no Ray cluster answers at {address}: {reason}") from error


def _answers(address: str) -> bool:
    try:
        _dial(address)
    except OSError:
        return False
    return True


def _dial(address: str) -> None:
    """Raises OSError: nobody listens there."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


def _connection_error(address: str, error: Exception) -> RayFailed:
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if "AuthToken" in text or "AuthenticationError" in f"{type(error)} {text}":
        return RayFailed(
            f"Ray at {address} does not let us in: its token is another one than ours "
            "(RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token)"
        )
    if "ersion mismatch" in text:
        return RayFailed(f"Ray at {address} is of another version than ours: {text}")
    if address == "auto":
        return RayFailed(
            "no Ray cluster runs on this machine (ray.address: auto); start one with `ray start "
            "--head`, or leave ray.address out and kvrelay starts one"
        )
    return RayFailed(f"no Ray cluster answers at {address}: {text[:200]}")


def _disconnect() -> None:
    import ray

    ray.shutdown()


def _ask(controller: Any, method: str, *args: object, timeout_s: float | None) -> Answer:
    """Raises what it could not do; RayFailed: it is gone; TimeoutError."""
    from ray.exceptions import RayActorError, RayError

    # Not `ray.wait`: it makes an exit of its own, with another status, of one by a signal.
    answer: concurrent.futures.Future[bytes] = getattr(controller, method).remote(*args).future()
    until = None if timeout_s is None else time.monotonic() + timeout_s
    while not concurrent.futures.wait([answer], timeout=_POLL_S).done:
        if until is not None and time.monotonic() > until:
            raise TimeoutError(f"{method} takes longer than {timeout_s:g} s")
    try:
        return unpack_or_raise(answer.result())
    except RayActorError as error:
        from cluster.ray_mode.member import describe_death

        raise RayFailed(f"the controller is gone: {describe_death(error)}") from error
    except RayError as error:
        raise RayFailed(f"{method} failed: {error}") from error


def _stop(controller: Any) -> None:
    """What it does not end in time is killed by others."""
    try:
        _ask(controller, "stop", timeout_s=_STOP_TIMEOUT_S)
    except (TimeoutError, RayFailed) as error:
        logger.warning("the cluster did not stop in order: %s", error)


def _bring_ray(spec: Spec, on_progress: Callable[[str], None]) -> KnownCluster:
    if spec.ray.address is not None:
        return KnownCluster(name=spec.name, address=spec.ray.address)
    if spec.ray.launcher is not None:
        from cluster.ray_mode.launcher import launch

        launcher = dict(spec.ray.launcher)
        address = launch(launcher, on_progress)
        return KnownCluster(name=spec.name, address=address, launcher=launcher)
    on_progress("starting Ray")
    return start_ray(spec.name, spec.ray, _num_cpus(spec))


def _end_ray(known: KnownCluster) -> None:
    """What we have started; a Ray cluster that was there before stays."""
    if known.launcher is not None:
        from cluster.ray_mode.launcher import end_hosts

        end_hosts(known.launcher)
    stop_ray(known)


def _num_cpus(spec: Spec) -> int:
    """As many as all nodes ask for: on one machine they share its cores in any case."""
    if spec.ray.num_cpus is not None:
        return spec.ray.num_cpus
    needed = sum(
        spec.resources[role].num_cpus * count for role, count in spec.config.num_nodes.items()
    )
    needed += spec.gateways.num_cpus * spec.gateways.count
    most = max((resources.num_cpus for resources in spec.resources.values()), default=1.0)
    return int(needed + max(_SPARE_CPUS, most) * 4 + 0.999)  # room to scale, and to replace


def _check_not_running(name: str, state: StateFile) -> None:
    known = state.read()
    if known is None or (known.temp_dir is None and known.launcher is None):
        return  # on another's Ray, which will say if it runs
    if runs(known) or (known.launcher is not None and _answers(known.address)):
        raise AlreadyRuns(
            "name",
            f"a cluster {name!r} was started from here and runs; choose another name, or end it "
            f"with `kvrelay down --name {name}`",
        )
    stop_ray(known)  # what it has left, if it died
    state.remove()


def _check_port(config: ServeConfig) -> None:
    """Before minutes are spent. Where gateways are on other hosts, they find out themselves."""
    if config.port:
        bind(config).close()


__all__ = ["AlreadyRuns", "NoPlace", "RayCluster", "RayFailed", "connect"]
