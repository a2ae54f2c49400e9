"""What README.md says that one types, and what it says that one sees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serve_process import ServeProcess

pytestmark = pytest.mark.real_model

README = Path(__file__).parents[2] / "README.md"
ITS_SERVER = "http://127.0.0.1:8000"


def test_curl(server: ServeProcess) -> None:
    command, shown = _block("curl "), json.loads(_block("{"))
    answer = json.loads(_run(["bash", "-c", command.replace(ITS_SERVER, server.url)]))
    assert answer.keys() == shown.keys()
    assert answer["choices"] == shown["choices"]
    for part in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][part] == shown["usage"][part]


def test_openai_client(server: ServeProcess) -> None:
    program, shown = _block("from openai"), _block("The capital of Germany")
    printed = _run([sys.executable, "-c", program.replace(ITS_SERVER, server.url)])
    assert printed.strip() == shown.strip()


def _block(beginning: str) -> str:
    """The first fenced block that begins like this."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if block.startswith(beginning))


def _run(command: list[str]) -> str:
    environment = {**os.environ, "NO_PROXY": "*", "no_proxy": "*"}
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=60, env=environment
    ).stdout
