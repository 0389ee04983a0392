"""The page about a job: whole by itself, and the same in every browser."""

from __future__ import annotations

import html
import html.parser
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from batch_files import prompts, write_lines

from jaxserve.core.errors import BatchError
from jaxserve.core.version import __version__
from jaxserve.offline import run_batch
from jaxserve.offline.reports.report import write_report

_VOID = {"meta", "link", "br"}


class Page(html.parser.HTMLParser):
    """Checks that elements nest, that ids are unique, and that nothing is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.used: set[str] = set()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("href", "src", "xlink:href"):
                assert value.startswith(("#", "data:")), value
                self.used.add(value.removeprefix("#"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()


@pytest.fixture(scope="module")
def runs(batch_llm, tmp_path_factory: pytest.TempPathFactory):
    """A run of several windows with some errors, and one that finds all of it done."""
    directory = tmp_path_factory.mktemp("report")
    bad = ["{<b>&", {"custom_id": "<script>alert(1)</script>", "prompt": "a" * 999}]
    lines = write_lines(directory / "in <&>.jsonl", [*prompts(40, max_tokens=30), *bad])
    return [run_batch(batch_llm, lines, directory / "out.jsonl") for _ in range(2)]


@pytest.fixture(scope="module")
def report(runs) -> Path:
    path = runs[0].job.output.with_name("report.html")
    write_report(path, runs[0], "jaxserve batch 'in <&>.jsonl' out.jsonl")
    return path


def test_the_page_is_whole_by_itself(report: Path):
    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("svg") == 5
    assert len(set(page.ids)) == len(page.ids)
    assert {name for name in page.used if not name.startswith("data:")} <= set(page.ids)
    assert "script" not in page.tags and "@import" not in text and "url(http" not in text
    assert "in &lt;&amp;&gt;.jsonl" in text
    assert "#0102" not in text, "every colour of a plot is one of the page's"


def test_the_page_says_what_was_done(runs, report: Path):
    text = report.read_text(encoding="utf-8")
    for words in ("All lines are done", "<b>42</b>", "invalid_line", "context_length_exceeded"):
        assert words in text
    assert f"<b>{runs[0].totals.num_output_tokens:,}</b>" in text


def test_the_page_says_when_and_how_the_job_ran(runs, report: Path):
    text = html.unescape(report.read_text(encoding="utf-8"))
    start, end = (
        f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
        for at in (runs[0].started, runs[0].ended)
    )
    assert abs(time.time() - runs[0].ended) < 3600 and runs[0].started < runs[0].ended
    assert f"jaxserve {__version__}, {start} to {end}." in text
    assert "<th>command</th><td>jaxserve batch 'in <&>.jsonl' out.jsonl</td>" in text
    for row in ("start of the job", "start of this run", "end of this run"):
        assert f"<th>{row}</th>" in text


def test_a_job_found_done_has_a_page_too(runs, tmp_path: Path):
    write_report(tmp_path / "again.html", runs[1])
    text = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert Page(text).tags.count("svg") == 2, "the lengths are known, times are not"
    assert f"<b>{runs[0].totals.num_output_tokens:,}</b>" in text


def test_a_page_that_cannot_be_written_is_told_of(runs, tmp_path: Path):
    with pytest.raises(BatchError, match="cannot be written"):
        write_report(tmp_path, runs[0])


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_a_complaint(report: Path, scheme: str):
    from playwright.sync_api import sync_playwright

    complaints, asked = [], []
    with sync_playwright() as playwright:
        # Debian's, where there is one; else the one that Playwright installs.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(report.as_uri())
        plots = page.locator("svg").all()
        boxes = [plot.bounding_box() for plot in plots]
        ink = page.locator("svg text").first.evaluate("it => getComputedStyle(it).fill")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        wide = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert not complaints
    assert asked == [report.as_uri()]
    assert len(boxes) == 5 and all(box["width"] > 200 and box["height"] > 80 for box in boxes)
    assert wide <= 0
    assert _brightness(ink) < 128 < _brightness(paper) or scheme == "dark"
    assert _brightness(ink) > 128 > _brightness(paper) or scheme == "light"


def _brightness(colour: str) -> float:
    """Of `rgb(r, g, b)`, from 0 to 255."""
    return sum(float(part) for part in colour[4:-1].split(",")) / 3
