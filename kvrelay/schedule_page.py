"""A run of a scenario as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from kvrelay.step_cell import Cell, CellState, Remark, remarks
from scheduler.scenario import ScenarioRun, ScenarioStep

_STEPS_PER_ROW = 40  # so many columns fit on a screen, and on paper across
_TEMPLATES = files("kvrelay") / "templates"


@dataclass(frozen=True)
class Lane:
    """A request in some of the steps."""

    request_id: str
    cells: Sequence[Cell]


@dataclass(frozen=True)
class Stretch:
    """Some steps that follow each other, with a lane for each request."""

    steps: Sequence[ScenarioStep]
    lanes: Sequence[Lane]


def render_page(title: str, about: str, run: ScenarioRun) -> str:
    """The page. All that comes from the file is escaped by the template engine."""
    script = _read("schedule.js")
    stretches = [
        _stretch(run, run.steps[start : start + _STEPS_PER_ROW])
        for start in range(0, len(run.steps), _STEPS_PER_ROW)
    ]
    shown = {cell.state for stretch in stretches for lane in stretch.lanes for cell in lane.cells}
    template = _environment().get_template("schedule.html")
    return template.render(
        title=title,
        about=about.strip(),
        run=run,
        settings=_settings(run),
        stretches=stretches,
        legend=[state for state in CellState if state in shown and state.meaning],
        remarks={step.number: _words(step) for step in run.steps},
        script=Markup(script),
        # The browser runs this very script and nothing else, whatever an id of a request may be.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _stretch(run: ScenarioRun, steps: Sequence[ScenarioStep]) -> Stretch:
    lanes = [Lane(i, [Cell.of(step, i) for step in steps]) for i in run.results]
    return Stretch(steps, lanes)


def _words(step: ScenarioStep) -> list[Remark]:
    return list(remarks(step, with_ends=True))


def _settings(run: ScenarioRun) -> list[tuple[str, str]]:
    """What bounds a step, and what is not as it would be by default."""
    config, cache = run.scenario.config, run.scenario.cache
    always = ("max_num_seqs", "max_num_batched_tokens", "policy")
    settings = [
        (item.name, str(getattr(config, item.name)))
        for item in fields(config)
        if item.name in always or getattr(config, item.name) != item.default
    ]
    settings.append(("KV cache", f"{cache.num_usable_blocks} blocks of {cache.block_size} tokens"))
    settings.append(("prefix caching", "on" if cache.enable_prefix_caching else "off"))
    return settings


def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
