"""`kvrelay schedule`: what it prints, the page that it writes, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.cells import cell_len

from cluster.yaml_file import load_yaml
from kvrelay.schedule_command import describe_end
from kvrelay.schedule_file import ScheduleFile
from scheduler.scenario import Ending
from scheduler.scenario_player import play
from tests.architecture import loaded_by
from tests.kvrelay.command import Kvrelay

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "schedules"
PREEMPTION = EXAMPLES / "preemption.yaml"

SMALL = """\
about: |
  Two of them.
config: {max_num_seqs: 2, max_num_batched_tokens: 8}
requests:
  - {id: A, prompt: 2, output: 3}
  - {id: B, prompt: 10, output: 2}
"""
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "scenario.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def rows(printed: str) -> list[list[str]]:
    """The words of each line that begins with a number: the steps."""
    return [line.split() for line in printed.splitlines() if re.match(r" *\d", line)]


class TestTerminal:
    def test_a_column_for_each_request(self, kvrelay: Kvrelay, write: Write) -> None:
        ended = kvrelay("schedule", write(SMALL))
        assert (ended.status, ended.stderr) == (0, "")
        assert rows(ended.stdout) == [
            ["0", "P", "2", "P", "6", "8/8", "2/2", "2/1024"],
            ["1", "D", "1", "P", "4", "5/8", "2/2", "2/1024"],
            ["2", "D", "1*", "D", "1*", "2/8", "2/2", "2/1024"],
        ]
        assert ended.stdout.startswith("Two of them.\n")
        assert ended.stdout.endswith("all requests have ended after 3 steps and 0 preemptions\n")

    def test_the_summary(self, kvrelay: Kvrelay, write: Write) -> None:
        lines = [line.split() for line in kvrelay("schedule", write(SMALL)).stdout.splitlines()]
        assert ["A", "0", "-", "0", "1", "2", "3/3", "-", "-", "finished"] in lines
        assert ["B", "0", "-", "1", "2", "2", "2/2", "-", "-", "finished"] in lines

    def test_why_somebody_waits_and_who_was_preempted(self, kvrelay: Kvrelay) -> None:
        printed = kvrelay("schedule", PREEMPTION).stdout
        assert "D waits for KV blocks" in printed
        assert "C waits for KV blocks; D behind C" in printed
        assert "B preempted" in printed
        assert ["16", "R", "21", "R", "11", "wait"] in [row[:6] for row in rows(printed)]
        assert "recompute: computed again after a preemption" in printed

    def test_a_refused_request_is_shown(self, kvrelay: Kvrelay) -> None:
        ended = kvrelay("schedule", EXAMPLES / "chunking-off.yaml")
        assert ended.status == 0
        printed = " ".join(ended.stdout.split())
        assert "X refused: the prompt has 10 tokens" in printed
        assert "0/3 - - refused" in printed

    @pytest.mark.parametrize("columns", [80, 100, 120])
    @pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
    def test_no_line_is_wider_than_the_terminal(
        self, kvrelay: Kvrelay, monkeypatch: pytest.MonkeyPatch, path: Path, columns: int
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        printed = kvrelay("schedule", path).stdout
        assert max(map(cell_len, printed.splitlines())) <= columns
        assert "\x1b" not in printed
        assert "…" not in printed, "nothing is cut off"

    def test_many_requests(self, kvrelay: Kvrelay, write: Write) -> None:
        text = SMALL.replace("max_num_seqs: 2", "max_num_seqs: 4").replace(
            "{id: A,", "{id: A, count: 30,"
        )
        printed = kvrelay("schedule", write(text)).stdout
        assert max(map(cell_len, printed.splitlines())) <= 100
        assert "A-01" in printed
        assert "A-30" in printed
        assert "D 4 x 1: A-01 A-02 A-03 A-04" in " ".join(printed.split())
        assert "+22 behind" in printed

    def test_only_so_many_steps(self, kvrelay: Kvrelay, write: Write) -> None:
        printed = kvrelay("schedule", write(SMALL), "--steps", "2").stdout
        assert len(rows(printed)) == 2
        assert "--steps shows more" in printed
        assert "unfinished" in printed

    def test_in_a_terminal_it_has_colours(
        self, kvrelay: Kvrelay, write: Write, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        assert "\x1b[" in kvrelay("schedule", write(SMALL)).stdout

    def test_markup_in_an_id_is_text(self, kvrelay: Kvrelay, write: Write) -> None:
        printed = kvrelay("schedule", write(SMALL.replace("id: A", 'id: "[bold]A"'))).stdout
        assert "[bold]A" in printed


@pytest.mark.parametrize(
    ("ending", "words"),
    [(Ending.STUCK, "stuck after 1 step:"), (Ending.TRUNCATED, "the first 1 step;")],
)
def test_a_run_that_did_not_end_says_so(ending: Ending, words: str) -> None:
    played = play(load_yaml(PREEMPTION, ScheduleFile).scenario, max_steps=1)
    assert words in describe_end(replace(played, ending=ending))


class Page(HTMLParser):
    """What the tests look at. Complains about tags that are closed in a wrong order."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text.append(data)

    def cells(self, request_id: str) -> list[tuple[str, str]]:
        """Class and words of the cells of a request."""
        return [
            (attributes["class"], attributes["title"])
            for tag, attributes in self.tags
            if tag == "td" and f", {request_id}: " in attributes.get("title", "")
        ]


class TestPage:
    @pytest.fixture
    def page(self, kvrelay: Kvrelay, tmp_path: Path) -> Page:
        path = tmp_path / "page.html"
        ended = kvrelay("schedule", PREEMPTION, "--html", path)
        assert ended.status == 0
        assert f"wrote {path}" in ended.stdout
        return Page(path.read_text(encoding="utf-8"))

    def test_a_cell_for_each_request_and_step(self, page: Page) -> None:
        assert all(len(page.cells(request_id)) == 28 for request_id in "ABCD")
        b = page.cells("B")
        assert b[0] == ("prefill", "step 0, B: admitted, prefill of 8 tokens")
        assert b[12][1] == "step 12, B: decode of 1 token, 19 were there before"
        assert b[13][0] == "preempted"
        assert b[14] == ("wait", "step 14, B: waits for KV blocks")
        words = "resumed, recompute of 21 tokens, 20 of them once more"
        assert b[16] == ("recompute", f"step 16, B: {words}")
        assert b[18][0] == "decode finished"
        assert b[19] == ("absent", "step 19, B: not here")

    def test_bars_of_budget_and_cache(self, page: Page) -> None:
        heights = [attributes["style"] for tag, attributes in page.tags if tag == "i"]
        titles = [a["title"] for tag, a in page.tags if tag == "td" and "title" in a]
        assert "step 0: 24 of 32 tokens" in titles
        assert "height:75.0%" in heights
        assert "step 1: 10 blocks used, 0 cached, 0 free" in titles
        assert "height:100.0%" in heights

    def test_it_needs_nothing_else(self, page: Page) -> None:
        loading = {"src", "href", "srcset", "action", "data", "poster", "background"}
        assert not [a for _, attributes in page.tags for a in attributes if a in loading]
        assert not {tag for tag, _ in page.tags} & {"link", "iframe", "object", "img", "base"}
        policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv"))
        assert policy.startswith("default-src 'none';")

    def test_long_runs_continue_below(self, kvrelay: Kvrelay, write: Write, tmp_path: Path) -> None:
        path = tmp_path / "page.html"
        kvrelay("schedule", write(SMALL.replace("output: 3", "output: 90")), "--html", path)
        page = Page(path.read_text(encoding="utf-8"))
        assert len(page.cells("A")) == 90
        assert len([tag for tag, _ in page.tags if tag == "table"]) == 3 + 2

    def test_what_comes_from_the_file_is_escaped(
        self, kvrelay: Kvrelay, write: Write, tmp_path: Path
    ) -> None:
        evil = "<script>alert('1')</script>\\\"onload=\\\"x"
        text = SMALL.replace("id: A", f'id: "{evil}"').replace("Two", "<b>&amp; Two")
        path = tmp_path / "page.html"
        kvrelay("schedule", write(text), "--html", path)
        page = Page(path.read_text(encoding="utf-8"))
        assert [tag for tag, _ in page.tags].count("script") == 1
        assert not [tag for tag, attributes in page.tags if tag == "b" or "onload" in attributes]
        shown = "".join(page.text)
        assert "<script>alert('1')</script>\"onload=\"x" in shown
        assert "<b>&amp; Two" in shown

    def test_a_place_that_cannot_be_written(
        self, kvrelay: Kvrelay, write: Write, tmp_path: Path
    ) -> None:
        for path in (tmp_path / "missing" / "page.html", tmp_path):
            kvrelay("schedule", write(SMALL), "--html", path).check_refused("--html", str(path))


REQUEST = "  - {id: A, prompt: 2, output: 3}\n"
WRONG = {
    "value": (SMALL.replace("prompt: 10", "prompt: 0"), "6: requests[1].prompt"),
    "type": (SMALL.replace("prompt: 10", "prompt: ten"), "6: requests[1].prompt"),
    "key": (SMALL.replace("output: 2", "output: 2, priorty: 1"), "did you mean priority?"),
    "settings": (SMALL.replace("seqs: 2", "seqs: 9"), "3: config.max_num_batched_tokens"),
    "default": ("config: {max_num_seqs: 600}\nrequests:\n" + REQUEST, "max_num_batched_tokens"),
    "pair": (SMALL.replace("output: 2", "output: 2, arrival: 4, abort: 3"), "6: requests[1].abort"),
    "twice": (SMALL.replace("id: B", "id: A"), "4: requests: there are two with the id 'A'"),
    "none": ("requests: []\n", "1: requests"),
    "blocks": ("cache: {num_blocks: 0}\nrequests:\n" + REQUEST, "1: cache.num_blocks"),
    "drafts": (
        "config: {spec_method: ngram, num_speculative_tokens: 2, async_scheduling: false}\n"
        "requests:\n" + REQUEST,
        "1: config: spec_method",
    ),
    "cached": (
        "cached: [{name: book, tokens: 9999}]\nrequests:\n" + REQUEST,
        "1: cached: 'book': the prompt has 9999 tokens",
    ),
    "escape": (SMALL.replace("id: A", r'id: "\e[31mA"'), "5: requests[0].id"),
    "blank": (SMALL.replace("id: A", 'id: "A B"'), "one word"),
    "yaml": ("requests: [", "scenario.yaml"),
}


@pytest.mark.parametrize(("text", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_file(kvrelay: Kvrelay, write: Write, text: str, words: str) -> None:
    ended = kvrelay("schedule", write(text))
    assert ended.stdout == ""
    ended.check_refused("scenario.yaml", words)


def test_a_file_that_is_not_there(kvrelay: Kvrelay, tmp_path: Path) -> None:
    kvrelay("schedule", tmp_path / "nothing.yaml").check_refused("nothing.yaml")


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_a_wrong_number_of_steps(kvrelay: Kvrelay, write: Write, steps: str) -> None:
    kvrelay("schedule", write(SMALL), f"--steps={steps}").check_refused("--steps")


def test_num_blocks_are_usable_ones(kvrelay: Kvrelay, write: Write) -> None:
    text = SMALL + "cache: {num_blocks: 3, block_size: 5}\n"
    assert "/3 " in kvrelay("schedule", write(text)).stdout


def test_it_needs_no_model() -> None:
    assert not loaded_by(ROOT, ["kvrelay.schedule_command"]) & {"torch", "ray"}
