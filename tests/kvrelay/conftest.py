"""The command line, run in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import cli
from tests.engine.tiny import tiny_model_dir
from tests.kvrelay.command import Ended, Kvrelay


@pytest.fixture
def kvrelay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Kvrelay]:
    """Runs a command; afterwards signals are handled as before."""

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr("sys.argv", ["kvrelay", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        return Ended(int(end.value.code or 0), printed.out, printed.err)

    for name in ("KVRELAY_API_KEY", "KVRELAY_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a Llama of random weights, for at most 2048 tokens."""
    return tiny_model_dir(tmp_path_factory.mktemp("model") / "tiny-llama")
