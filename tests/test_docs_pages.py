"""The documents as pages: on a screen of 1280 pixels nothing is cut off or must be scrolled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ["", "getting-started/", "benchmarks/kv/", "reference/cli/", "reference/python/"]
CUT_OFF = """() => [...document.querySelectorAll('.md-content *')]
  .filter(it => it.clientWidth > 0 && it.scrollWidth > it.clientWidth + 1
                && getComputedStyle(it).overflowX != 'visible')
  .map(it => `${it.tagName}.${it.className}: ${it.innerText.slice(0, 60)}`)"""

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*command, "--site-dir", str(directory)], check=True, cwd=ROOT)
    return directory


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield chromium
        chromium.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_screen(name, site, browser, tmp_path):
    """Its screenshot is in the test's directory."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((site / name / "index.html").as_uri())
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert page.evaluate(CUT_OFF) == []
    assert page.locator(".md-content__inner").bounding_box()["width"] > 900
    page.close()


def test_a_telephone_scrolls_tables_and_not_the_page(site, browser):
    page = browser.new_page(viewport={"width": 390, "height": 800})
    for name in PAGES:
        page.goto((site / name / "index.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
    page.close()


def test_signatures_are_formatted(site):
    """One parameter a line, where they do not fit on one."""
    text = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert "LLM" in text and '<span class="p">(</span>\n' in text
