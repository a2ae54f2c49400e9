"""Kernels are built once, whoever asks, and what is used where they cannot be.

Most tests build a small module, with a compiler that writes down when it is called.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.engine_config import EngineConfig, KernelsChoice
from engine.kernels import (
    CompiledKernels,
    KernelsUnavailable,
    TorchKernels,
    build,
    choose_kernels,
)
from protocol import ConfigError

REPOSITORY = Path(__file__).parents[3]
MODULE = """
#include <Python.h>
#define JOIN(a, b) a##b
#define START(name) JOIN(PyInit_, name)
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
PyMODINIT_FUNC START(TORCH_EXTENSION_NAME)() { return PyModule_Create(&module); }
"""
COMPILER = """#!/bin/sh
case "$*" in *" -c "*)
  echo $$ >> {log}
  if [ -e {slow} ]; then exec sleep 100; fi
esac
exec /usr/bin/env c++ "$@"
"""
ASK = """
import sys
from pathlib import Path
from engine.kernels import build
build.SOURCE = Path(sys.argv[1])
print(build.build(Path(sys.argv[2])).answer())
"""


@dataclass(frozen=True)
class Workshop:
    """A source, a compiler, and where builds are kept."""

    source: Path
    root: Path
    log: Path  # one line for each time that something was compiled
    slow: Path  # while it exists, compiling takes for ever

    @property
    def num_compiled(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def ask(self) -> subprocess.Popen[str]:
        """Another process that wants the module."""
        return subprocess.Popen(
            [sys.executable, "-c", ASK, str(self.source), str(self.root)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def partial(self) -> list[Path]:
        return list(self.root.rglob("*.partial"))


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path / "small.cpp", tmp_path / "root", tmp_path / "log", tmp_path / "slow")
    made.source.write_text(MODULE)
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(log=made.log, slow=made.slow))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "SOURCE", made.source)
    return made


class TestOnce:
    def test_the_second_call_does_not_compile(self, workshop: Workshop) -> None:
        assert build.build(workshop.root).answer() == 42
        assert build.build(workshop.root).answer() == 42
        assert workshop.num_compiled == 1
        assert workshop.partial() == []

    def test_for_each_root(self, workshop: Workshop) -> None:
        for root in ("a", "b", "c"):
            assert build.build(workshop.root / root).answer() == 42
        assert workshop.num_compiled == 3

    def test_for_each_state_of_the_source_of_which_the_last_is_kept(
        self, workshop: Workshop
    ) -> None:
        build.build(workshop.root)
        workshop.source.write_text(MODULE.replace("42", "43"))
        assert build.build(workshop.root).answer() == 43
        assert len(list(workshop.root.rglob("*.so"))) == 1

    def test_two_processes_at_once(self, workshop: Workshop) -> None:
        askers = [workshop.ask() for _ in range(2)]
        assert [asker.communicate(timeout=100)[0] for asker in askers] == ["42\n", "42\n"]
        assert workshop.num_compiled == 1

    def test_a_killed_builder_is_in_nobodys_way(self, workshop: Workshop) -> None:
        """Even if the compiler that it had started lives on."""
        workshop.slow.touch()
        asker = workshop.ask()
        try:
            while workshop.num_compiled == 0:
                assert asker.poll() is None
                time.sleep(0.02)
            asker.kill()
            asker.communicate()
            assert len(workshop.partial()) == 1
            workshop.slow.unlink()
            assert build.build(workshop.root).answer() == 42
            assert workshop.partial() == []
        finally:
            os.killpg(asker.pid, signal.SIGKILL)


def test_a_build_that_failed_may_be_tried_again(workshop: Workshop) -> None:
    workshop.source.write_text("#error no\n" + MODULE)
    for _ in range(2):
        with pytest.raises(KernelsUnavailable, match=r"^small\.cpp does not compile: \S.*$"):
            build.build(workshop.root, "AVX2")
    assert workshop.num_compiled == 2
    assert workshop.partial() == []
    workshop.source.write_text(MODULE)
    assert build.build(workshop.root, "AVX2").answer() == 42


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="only then AMX is looked for"
)
def test_a_compiler_that_is_older_than_amx(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_has_amx", lambda: True)
    monkeypatch.setitem(build._CPU_FLAGS, "AMX", ("-mno-such-thing",))
    assert build.build(workshop.root).answer() == 42
    assert workshop.num_compiled == 2


def test_nowhere_to_keep_it(workshop: Workshop) -> None:
    workshop.root.write_text("a file")
    with pytest.raises(KernelsUnavailable, match=r"^the compiled kernels cannot be kept: "):
        build.build(workshop.root)


class TestWithoutACompiler:
    @pytest.fixture(autouse=True)
    def _no_compiler(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CXX", str(tmp_path / "nowhere" / "c++"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of torch as well

    def test_it_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(KernelsUnavailable, match=r"^there is no C\+\+ compiler \(/.*c\+\+\)$"):
            CompiledKernels()

    def test_auto_computes_with_torch_and_warns(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            kernels = choose_kernels(EngineConfig())
        assert isinstance(kernels, TorchKernels)
        (warning,) = caplog.messages
        assert warning.startswith("computing with plain torch, several times slower: there is no")

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            (EngineConfig(kernels=KernelsChoice.COMPILED), "kernels"),
            (EngineConfig(batch_invariant=True), "batch_invariant"),
            (EngineConfig(kernels=KernelsChoice.COMPILED, batch_invariant=True), "batch_invariant"),
        ],
    )
    def test_what_needs_one_is_refused(self, config: EngineConfig, field: str) -> None:
        with pytest.raises(ConfigError, match=r"there is no C\+\+ compiler") as caught:
            choose_kernels(config)
        assert caught.value.field == field

    def test_torch_needs_none(self, caplog: pytest.LogCaptureFixture) -> None:
        kernels = choose_kernels(EngineConfig(kernels=KernelsChoice.TORCH))
        assert (kernels.name, caplog.messages) == ("torch", [])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_with_a_compiler_they_are_chosen(invariant: CompiledKernels, batch_invariant: bool) -> None:
    chosen = choose_kernels(EngineConfig(batch_invariant=batch_invariant))
    assert isinstance(chosen, CompiledKernels)
    assert (chosen.name, chosen.batch_invariant) == ("compiled", batch_invariant)
