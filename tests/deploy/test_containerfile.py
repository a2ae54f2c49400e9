"""deploy/Containerfile, as far as that can be seen without building it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

from ray import __version__ as ray_version

from tests.deploy.deployments import DEPLOY, ROOT

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str


def _instructions() -> list[Instruction]:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = lines.replace("\\\n", " ")
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [Instruction(name, " ".join(text.split())) for name, text in found]


def _texts(name: str) -> list[str]:
    return [instruction.text for instruction in _instructions() if instruction.name == name]


def test_every_instruction_is_one() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "CMD"}
    names = [instruction.name for instruction in _instructions()]
    assert set(names) <= known
    assert names[:2] == ["ARG", "FROM"]


def test_what_is_copied_exists_and_nothing_is_forgotten() -> None:
    sources = [
        source.rstrip("/")
        for text in _texts("COPY")
        if not text.startswith("--from=")
        for source in text.split()[:-1]
    ]
    for source in sources:
        assert (ROOT / source).exists(), source
    packages = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    project = _PROJECT["project"]
    assert set(sources) == {"pyproject.toml", project["readme"], *project["license-files"]} | set(
        packages
    )


def test_stages_that_are_copied_from_exist() -> None:
    stages = {found[1] for text in _texts("FROM") if (found := re.search(r" AS (\w+)$", text))}
    copied = {found[1] for text in _texts("COPY") if (found := re.match(r"--from=(\w+)", text))}
    assert copied
    assert copied <= stages


def test_it_runs_as_nobody_in_particular() -> None:
    names = [instruction.name for instruction in _instructions()]
    assert _texts("USER") == ["1000:1000"]
    assert "RUN" not in names[names.index("USER") :]


def test_nothing_secret_is_asked_for() -> None:
    arguments = {text.partition("=")[0] for text in _texts("ARG")}
    assert arguments == {"PYTHON", "TORCH", "TORCH_INDEX", "RAY"}
    assert not _texts("ENV")


def test_versions_are_those_of_the_project() -> None:
    arguments = dict(text.split("=", 1) for text in _texts("ARG"))
    assert f"torch=={arguments['TORCH']}" in _PROJECT["project"]["dependencies"]
    assert arguments["RAY"] == ray_version


def test_extras_are_those_of_the_project() -> None:
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", " ".join(_texts("RUN")))
    assert set(extras.split(",")) <= set(_PROJECT["project"]["optional-dependencies"])
    assert {"ray", "nixl", "redis"} == set(extras.split(","))
