"""Builds a directory once, whole or not at all, whoever else tries or gets killed meanwhile.

<folder>/.lock                   held while building; the kernel lets go when its holder dies
<folder>/<key>.<pid>.partial/    being built; what a killed builder left is thrown away
<folder>/<key>/                  complete, from the rename on, and never changed again
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.weights.progress import ProgressSink, Stage


def build_once(target: Path, build: Callable[[Path], None], progress: ProgressSink) -> None:
    """Make `target` exist: `build` fills an empty directory, which then becomes `target`.

    Other directories beside `target` are older states of the same model and are removed. Blocks
    while another process builds. Raises OSError, and whatever `build` raises.
    """
    if target.is_dir():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / ".lock", progress):
        if not target.is_dir():
            _build(target, build)


def _build(target: Path, build: Callable[[Path], None]) -> None:
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    _remove_siblings(target)
    partial.mkdir()
    try:
        build(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_siblings(target: Path) -> None:
    for sibling in target.parent.iterdir():
        if sibling.is_dir() and sibling != target:
            # A download may outlive its killed parent and still write here; what it leaves then
            # goes at the next occasion.
            shutil.rmtree(sibling, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: ProgressSink) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.update(Stage.WAIT, 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
