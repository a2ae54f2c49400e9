"""What is wrong with a server, a password or a certificate is said at the start, and said well."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from directory import AlreadyClaimed, DirectoryUnavailable, RedisConfig, RedisDirectory
from protocol import ConfigError
from tests.directory.conformance import batch, info, sequences
from tests.directory.servers import KINDS, Server, binary_of, new_prefix

SETTLE_S = 5.0
PASSWORD = "s3cret: not /to be seen"


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = Server(request.param)
    yield server
    server.stop()


def refused(config: RedisConfig) -> ConfigError:
    with RedisDirectory(config) as directory, pytest.raises(ConfigError) as caught:
        directory.start()
    assert directory._thread not in threading.enumerate()
    return caught.value


@contextlib.contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Something that is no Redis; with None it says nothing. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    if answer is not None:
                        connection.sendall(answer)
                    connection.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
    thread.join()


# --- what can be wrong ---------------------------------------------------------------------------


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = refused(RedisConfig(f"redis://u:{'pw'}@127.0.0.1:{port}/2"))
    assert str(error) == f"url: nothing listens at redis://127.0.0.1:{port}/2"


def test_no_socket_there(tmp_path: Path) -> None:
    error = refused(RedisConfig(f"unix://{tmp_path}/none.sock"))
    assert str(error) == f"url: nothing listens at unix://{tmp_path}/none.sock"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..host", "x" * 64])
def test_an_unknown_host(host: str) -> None:
    error = refused(RedisConfig(f"redis://{host}"))
    assert str(error) == f"url: the host name {host!r} is not known"


def test_a_wrong_password(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    error = refused(RedisConfig(server.url, password=PASSWORD))
    assert error.field == "password"
    assert "refuses it" in error.problem
    assert PASSWORD not in caplog.text + repr(error)


def test_a_missing_password(server: Server) -> None:
    error = refused(RedisConfig(server.url))
    assert error.field == "password"
    assert "asks for one" in error.problem


def test_a_web_server() -> None:
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        error = refused(RedisConfig(url))
    assert error.field == "url"
    assert "is no Redis or Valkey server" in error.problem


def test_a_server_that_says_nothing() -> None:
    with listener(None) as url:
        error = refused(RedisConfig(url, io_timeout_s=0.1))
    assert error.problem.endswith("does not answer within 0.1 s")


def test_no_tls_there(server: Server) -> None:
    url = server.url.replace("redis://", "rediss://")
    error = refused(RedisConfig(url, password=server.password, io_timeout_s=0.2))
    assert error.field == "url"
    assert "TLS" in error.problem


def test_without_need_it_goes_on_trying(server: Server) -> None:
    with RedisDirectory(RedisConfig(server.url, password=PASSWORD)) as directory:
        directory.start(need_server=False)
        directory.register(info(), ttl_s=1)
        assert not directory.available
        assert directory.nodes() == ()
        with pytest.raises(DirectoryUnavailable):
            directory.claim("me", ttl_s=1)


# --- users, clusters, owners ---------------------------------------------------------------------


def test_a_user_that_may_only_touch_its_own_cluster(server: Server) -> None:
    name = new_prefix()
    commands = "+eval +@hash +@stream +@string +@keyspace +time +ping +hello +client"
    rules = f"on >{'user-pw'} ~{{{name}}}:* resetchannels -@all {commands}"
    server.ask("ACL", "SETUSER", "kvrelay", *rules.split())
    host = server.url.removeprefix("redis://")
    with RedisDirectory(RedisConfig(f"valkey://kvrelay:user-pw@{host}", key_prefix=name)) as its:
        its.start()
        its.register(info(), ttl_s=60)
        its.claim("me", ttl_s=60)
        assert its.sync(SETTLE_S)
        assert [record.info for record in its.nodes()] == [info()]
    error = refused(RedisConfig(f"valkey://kvrelay:user-pw@{host}", key_prefix="other"))
    assert "may not do all that is needed" in error.problem
    assert "user-pw" not in str(error)


def test_clusters_with_different_prefixes_do_not_meet(server: Server) -> None:
    one, other = new_prefix(), new_prefix()
    with server.directory(one) as here, server.directory(other) as there:
        subscription = there.subscribe()
        here.register(info(generation=7), ttl_s=60)
        here.publish(batch(1), generation=7)
        here.claim("me", ttl_s=60)
        there.register(info(generation=1), ttl_s=60)
        there.claim("you", ttl_s=60)
        there.publish(batch(5), generation=1)
        assert here.sync(SETTLE_S)
        assert there.sync(SETTLE_S)
        assert [record.info.generation for record in there.nodes()] == [1]
        assert sequences(subscription) == [5]


def test_one_controls_a_cluster(server: Server) -> None:
    name = new_prefix()
    with server.directory(name) as first, server.directory(name) as second:
        first.claim("first on host a", ttl_s=60)
        first.renew("first on host a", ttl_s=60)
        with pytest.raises(AlreadyClaimed, match="first on host a") as caught:
            second.claim("second", ttl_s=60)
        assert 50 < caught.value.remaining_s <= 60
        second.release("second")  # is not its own
        with pytest.raises(AlreadyClaimed):
            second.claim("second", ttl_s=60)
        first.release("first on host a")
        second.claim("second", ttl_s=60)
        with pytest.raises(AlreadyClaimed):
            first.renew("first on host a", ttl_s=60)


def test_a_claim_that_is_not_renewed_ends(server: Server) -> None:
    name = new_prefix()
    with server.directory(name) as first, server.directory(name) as second:
        first.claim("first", ttl_s=0.05)
        time.sleep(0.1)  # on the server's clock
        second.claim("second", ttl_s=60)


# --- other ways to connect -----------------------------------------------------------------------


def test_a_unix_socket_and_another_database(tmp_path: Path) -> None:
    with redis_server(tmp_path, "port 0", f"unixsocket {tmp_path}/s") as wait:
        wait(f"{tmp_path}/s")
        with RedisDirectory(RedisConfig(f"unix://{tmp_path}/s?db=3")) as directory:
            directory.start()
            directory.register(info(), ttl_s=60)
            assert directory.sync(SETTLE_S)
            assert len(directory.nodes()) == 1


def test_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [
        "port 0",
        f"tls-port {port}",
        f"tls-cert-file {tmp_path}/server.pem",
        f"tls-key-file {tmp_path}/server.key",
        f"tls-ca-cert-file {tmp_path}/ca.pem",
    ]
    url = f"rediss://127.0.0.1:{port}"
    ours: dict[str, Any] = {
        "tls_cert": f"{tmp_path}/client.pem",
        "tls_key": f"{tmp_path}/client.key",
    }
    with redis_server(tmp_path, *settings) as wait:
        wait(("127.0.0.1", port))
        config = RedisConfig(url, tls_ca=f"{tmp_path}/ca.pem", **ours)
        with RedisDirectory(config) as directory:
            directory.start()
            directory.register(info(), ttl_s=60)
            assert directory.sync(SETTLE_S)
            assert len(directory.nodes()) == 1
        unknown = refused(RedisConfig(url, **ours))
        assert "the certificate of" in unknown.problem
        assert "is refused" in unknown.problem
        unnamed = refused(RedisConfig(url.replace("127.0.0.1", "localhost"), **vars_of(config)))
        assert unnamed.field == "tls_ca"
        assert refused(RedisConfig(url, tls_ca=f"{tmp_path}/ca.pem")).field == "url"
        assert refused(RedisConfig(f"redis://127.0.0.1:{port}")).field == "url"


def vars_of(config: RedisConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("tls_ca", "tls_cert", "tls_key")}


@contextlib.contextmanager
def redis_server(
    tmp_path: Path, *settings: str
) -> Iterator[Callable[[str | tuple[str, int]], None]]:
    """Debian's server with settings that the embedded one does not have."""
    binary = binary_of("redis-server")
    lines = [*settings, 'save ""', f"dir {tmp_path}", "loglevel warning"]
    with subprocess.Popen(
        [str(binary), "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        process.stdin.write("\n".join([*lines, ""]).encode())
        process.stdin.close()

        def wait(address: str | tuple[str, int]) -> None:
            kind = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            for _ in range(500):
                with socket.socket(kind) as probe:
                    if probe.connect_ex(address) == 0:
                        return
                if process.poll() is not None:
                    break
                time.sleep(0.01)
            assert process.stdout is not None
            process.kill()
            said = process.stdout.read().decode()
            if "tls" in said and "Bad directive" in said:
                pytest.skip("this redis-server knows no TLS")
            pytest.fail(said)

        try:
            yield wait
        finally:
            process.kill()


def make_certificates(directory: Path) -> None:
    """ca.pem, and signed by it server.pem and client.pem, for 127.0.0.1, with their keys."""
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    run(
        *new,
        "-x509",
        "-days",
        "2",
        "-subj",
        "/CN=ca",
        "-out",
        "ca.pem",
        "-keyout",
        "ca.key",
        at=directory,
    )
    for name in ("server", "client"):
        run(
            *new,
            "-subj",
            f"/CN={name}",
            "-out",
            f"{name}.csr",
            "-keyout",
            f"{name}.key",
            at=directory,
        )
        sign = ["openssl", "x509", "-req", "-days", "2", "-CA", "ca.pem", "-CAkey", "ca.key"]
        sign += ["-CAcreateserial", "-extfile", "san"]
        run(*sign, "-in", f"{name}.csr", "-out", f"{name}.pem", at=directory)


def run(*command: str, at: Path) -> None:
    subprocess.run(command, cwd=at, check=True, capture_output=True)
