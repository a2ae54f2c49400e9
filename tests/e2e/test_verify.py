"""`kvrelay verify` as its users have it: a process."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.serve_process import ServeProcess, run_kvrelay

_STOP_S = 20.0
_WHOLE_S = 240.0  # the kernels may have to be built
_BETWEEN_S = 0.05


class VerifyProcess(ServeProcess):
    """`kvrelay verify`, which serves nobody."""

    def _command(self, *arguments: str | Path) -> list[str | Path]:
        command = super()._command(*arguments)
        return [command[0], "verify", *arguments]


@pytest.mark.parametrize("after_s", [0.0, 2.0])
@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)],
    ids=["SIGTERM", "Ctrl-C twice"],
)
def test_signals_leave_nothing(
    tmp_path: Path, tiny_model: Path, numbers: tuple[signal.Signals, ...], after_s: float
) -> None:
    process = VerifyProcess(tmp_path / "verify", tiny_model, "--max-tokens", "1024")
    try:
        process.wait_until_printed("model ")
        time.sleep(after_s)
        assert process.is_running, process.log
        for number in numbers:
            process.send(number)
            time.sleep(_BETWEEN_S)
        assert process.wait(_STOP_S) == 130, process.log
        assert not process.has_descendants()
        assert process.errors == ""
        assert "bit for bit" not in process.output
    finally:
        process.kill()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    ended = run_kvrelay("verify", tmp_path / "nothing")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1


def test_a_tiny_model(tiny_model: Path) -> None:
    ended = run_kvrelay("verify", tiny_model, "--prompts", "8", timeout_s=_WHOLE_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "bit for bit the same in" in ended.stdout
