from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from engine.weights import ModelStore, Stage
from protocol import ModelError
from tests.engine.weights.conftest import Steps
from tests.engine.weights.tiny_models import CONFIG, TinyGGUF, write_hf_directory

ROOT = Path(__file__).parents[3]

RESOLVE = """
import os, signal, sys
from pathlib import Path
from engine.weights import ModelStore, Stage

class Sink:
    def update(self, stage, done, total):
        if stage is Stage.CONVERT:
            print("convert", done, flush=True)
            if done == 3 and sys.argv[3] == "die":
                os.kill(os.getpid(), signal.SIGKILL)

print(ModelStore(Path(sys.argv[1])).resolve(sys.argv[2], progress=Sink()).fingerprint)
"""


def start(cache: Path, model: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE, str(cache), str(model), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_directory_is_used_where_it_lies(store: ModelStore, tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path / "my-model")
    files = store.resolve(str(directory))
    assert (files.name, files.directory) == ("my-model", directory)
    assert not (tmp_path / "cache").exists()


def test_a_relative_path(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_directory(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path / "my-model")
    assert store.resolve(".").name == "my-model"
    monkeypatch.chdir(tmp_path)
    assert store.resolve("my-model").directory == tmp_path / "my-model"


def test_a_gguf_file_is_converted_once(store: ModelStore, tmp_path: Path, steps: Steps) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    first = store.resolve(str(path), progress=steps)
    assert first.name == "tiny"
    assert steps.of(Stage.CONVERT)[-1] == (20, 20)
    again = Steps()
    assert store.resolve(str(path), progress=again) == first
    assert not again.seen


def test_a_changed_gguf_file_is_converted_anew(store: ModelStore, tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    first = store.resolve(str(path))
    changed = TinyGGUF()
    changed.quantize(GGMLQuantizationType.Q8_0)
    changed.write(path)
    second = store.resolve(str(path))
    assert second.fingerprint != first.fingerprint
    assert not first.directory.exists()


def test_a_touched_gguf_file_is_the_same_model(store: ModelStore, tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    first = store.resolve(str(path))
    os.utime(path, (1, 1))
    assert store.resolve(str(path)).fingerprint == first.fingerprint


def test_a_copied_conversion_has_the_same_fingerprint(store: ModelStore, tmp_path: Path) -> None:
    converted = store.resolve(str(TinyGGUF().write(tmp_path / "tiny.gguf")))
    copy = shutil.copytree(converted.directory, tmp_path / "copy")
    assert store.resolve(str(copy)).fingerprint == converted.fingerprint


def test_finding_a_model_needs_no_torch() -> None:
    code = "import sys, engine.weights; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_two_starts_at_once_convert_once(tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    starts = [start(tmp_path / "cache", path, "live") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split() for process in starts]
    assert [process.returncode for process in starts] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sorted(output.count("convert") for output in outputs) == [0, 21]


def test_a_killed_start_leaves_no_half_model(tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    killed = start(tmp_path / "cache", path, "die")
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    assert list((tmp_path / "cache").rglob("*.partial"))
    files = ModelStore(tmp_path / "cache").resolve(str(path))
    assert files.config.num_layers == 2
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("length", [0, 3, 5000, 100_000])
def test_a_gguf_file_that_was_cut_off(store: ModelStore, tmp_path: Path, length: int) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        store.resolve(str(path))
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_conversion_that_lost_a_file(store: ModelStore, tmp_path: Path) -> None:
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    (store.resolve(str(path)).directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        store.resolve(str(path))


def test_a_file_that_is_no_model(store: ModelStore, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ModelError, match=r"model\.bin: not a model"):
        store.resolve(str(path))


@pytest.mark.parametrize(
    "model", ["./nothing", "/no/such/thing", "~/nothing-here", "~nobody-here/x", "x.gguf"]
)
def test_a_path_that_does_not_exist(store: ModelStore, model: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        store.resolve(model)


@pytest.mark.parametrize("model", ["smollm", "SmolLM2-135M", "smollm2_135m", "smolm2-135"])
def test_a_name_that_is_nearly_known(store: ModelStore, model: str) -> None:
    with pytest.raises(ModelError, match="did you mean 'smollm2-135m'"):
        store.resolve(model)


@pytest.mark.parametrize("model", ["gpt-5", "", "a b", "org/"])
def test_a_name_that_nobody_knows(store: ModelStore, model: str) -> None:
    with pytest.raises(ModelError, match="known names: smollm2-135m"):
        store.resolve(model)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = TinyGGUF().write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="Not a directory"):
        ModelStore(tmp_path / "file").resolve(str(path))


def test_broken_directory(store: ModelStore, tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path / "m", CONFIG | {"hidden_act": "gelu"})
    with pytest.raises(ModelError, match="gelu"):
        store.resolve(str(directory))
