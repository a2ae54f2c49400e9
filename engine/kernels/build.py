"""Builds the compiled kernels, once for each kind of CPU, release of Python and of torch, and state
of the source.

They lie where torch keeps extensions (`~/.cache/torch_extensions`). `make setup` builds them ahead
of the first start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from engine.weights import NoProgress, build_once

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")

# The source is written in vectors of 64 bytes, which the compiler divides for smaller registers.
# -Wno-psabi: how such vectors would be passed to functions matters only if one is not inlined.
_FLAGS = ("-O3", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi")
_CPU_FLAGS = {
    "AMX": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
        *("-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}


class KernelsUnavailable(Exception):
    """They cannot be built here; the message says why, in a line."""


def build(root: Path | None = None, cpu: str | None = None) -> ModuleType:
    """The extension module, built if it never was. Several processes may call this at once.

    `root`: where builds are kept; `cpu`: what to build for, as
    `torch.backends.cpu.get_cpu_capability` says it, or AMX. Raises KernelsUnavailable.
    """
    if cpu is not None:
        return _build_for(cpu, root or _default_root())
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and _has_amx():
        try:
            return _build_for("AMX", root or _default_root())
        except KernelsUnavailable:  # a compiler that is older than AMX
            logger.debug("no kernels for AMX", exc_info=True)
    return _build_for(capability, root or _default_root())


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported() and torch.cpu._is_avx512_bf16_supported()


def _build_for(cpu: str, root: Path) -> ModuleType:
    flags = (*_FLAGS, *_CPU_FLAGS.get(cpu, ()))
    name = f"kvrelay_kernels_{_digest(flags)}"
    target = root / _kind_of(cpu) / name
    try:
        build_once(target, lambda empty: _compile(name, flags, empty), NoProgress())
        return _import(name, target / f"{name}.so")
    except (OSError, ImportError) as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be kept: {error}") from error


def _default_root() -> Path:
    from torch.utils import cpp_extension  # takes a while

    return Path(cpp_extension.get_default_build_root()) / "kvrelay"


def _kind_of(cpu: str) -> str:
    """What a build is for: older builds of the same kind are removed."""
    cpu = cpu.lower().replace(" ", "_")
    return f"{cpu}-{sys.implementation.cache_tag}-torch-{torch.__version__}"


def _digest(flags: Sequence[str]) -> str:
    digest = hashlib.sha256(SOURCE.read_bytes())
    digest.update(repr((flags, torch.__version__)).encode())
    return digest.hexdigest()[:16]


def _compile(name: str, flags: Sequence[str], directory: Path) -> None:
    """As `torch.utils.cpp_extension.load` does, which needs ninja, and never builds a module of the
    same name again in one process.
    """
    from torch.utils import cpp_extension

    compiler = shlex.split(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    if shutil.which(compiler[0]) is None:
        raise KernelsUnavailable(f"there is no C++ compiler ({compiler[0]})")
    # A start that takes so long has to say why.
    logger.warning("compiling %s for this CPU: this takes about a minute, once", SOURCE.name)
    compiled, headers = directory / "kernels.o", [sysconfig.get_path("include")]
    headers += cpp_extension.include_paths()
    _run(
        [*compiler, *flags, "-c", str(SOURCE), "-o", str(compiled), "-std=c++20", "-fPIC"]
        + [f"-isystem{path}" for path in headers]
        + [f"-DTORCH_EXTENSION_NAME={name}"]
    )
    # Without -fopenmp: that would bring an OpenMP library beside the one that torch comes with.
    _run(
        [*compiler, "-shared", str(compiled), "-o", str(directory / f"{name}.so")]
        + [f"-L{path}" for path in cpp_extension.library_paths()]
        + [f"-l{library}" for library in ("c10", "torch_cpu", "torch", "torch_python")]
    )
    compiled.unlink()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        lines = done.stderr.splitlines() or [f"{command[0]} ends with {done.returncode}"]
        line = next((line for line in lines if "error" in line), lines[0])
        raise KernelsUnavailable(f"{SOURCE.name} does not compile: {line}")


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
