"""`kvrelay schedule`: what the scheduler decides for a small scenario, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cluster.yaml_file import load_yaml
from kvrelay.schedule_file import ScheduleFile
from kvrelay.schedule_page import render_page
from kvrelay.schedule_table import ScheduleTables
from protocol import ConfigError
from scheduler.scenario import Ending, ScenarioRun
from scheduler.scenario_player import play


@dataclass(frozen=True)
class ScheduleCommand:
    """All that the user asked for."""

    file: Path
    html: Path | None
    max_steps: int
    console: Console

    def run(self) -> None:
        """Print the tables, and write the page if one is wanted.

        Raises:
            ConfigError: the file is not a scenario, or the page cannot be written.
        """
        schedule = load_yaml(self.file, ScheduleFile)
        played = play(schedule.scenario, self.max_steps)
        if schedule.about:
            self.console.print(Text(schedule.about.strip()))
            self.console.print()
        ScheduleTables(played, self.console.width).print_on(self.console)
        self.console.print(Text(describe_end(played)))
        if self.html is not None:
            _write(self.html, render_page(self.file.name, schedule.about, played))
            self.console.print(Text(f"wrote {self.html}"), soft_wrap=True)


def describe_end(played: ScenarioRun) -> str:
    steps = _counted(len(played.steps), "step")
    match played.ending:
        case Ending.COMPLETE:
            preemptions = _counted(played.num_preemptions, "preemption")
            return f"all requests have ended after {steps} and {preemptions}"
        case Ending.STUCK:
            return f"stuck after {steps}: nothing that waits can ever be admitted"
        case Ending.TRUNCATED:
            return f"that were the first {steps}; --steps shows more"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("html", f"{path} cannot be written: {error.strerror}") from error
