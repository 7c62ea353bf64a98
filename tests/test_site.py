"""The documentation's site builds without a warning and works in a browser, without a network."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unisono

REPOSITORY = Path(__file__).resolve().parents[1]
BROWSER = os.environ.get("UNISONO_TEST_BROWSER") or shutil.which("chromium")
pytest.importorskip("mkdocs", reason="`make docs` installs what builds the site")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str], Path]]:
    """Build the site and serve it to this host; gives its address, its pages and its folder."""
    tmp_path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        pages = sorted(str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}/", pages, tmp_path
        server.shutdown()
        serving.join()


# Texts that the eye hardly tells from what is behind them: WCAG asks for 4.5 to 1, of large ones 3.
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
# What a screen reader needs: a language, one first heading, no level left out, pictures in words.
STRUCTURE = """[
  document.documentElement.lang ? "" : "no language",
  document.querySelectorAll("h1").length === 1 ? "" : "not one h1",
  ...[...document.querySelectorAll("article :is(h1, h2, h3, h4, h5, h6)")]
    .filter((each, i, all) => each.tagName[1] > 1 + (i && +all[i - 1].tagName[1]))
    .map(each => "skips a level: " + each.textContent),
  ...[...document.querySelectorAll("img:not([alt]), img[alt='']")].map(each => each.src),
  ...[...document.querySelectorAll("[id]")].map(each => each.id)
    .filter((id, i, all) => all.indexOf(id) < i).map(id => "twice: " + id),
].filter(each => each)"""
NEED_NAMES = {"button", "checkbox", "link", "radio", "searchbox", "textbox"}
# Links on this site, without those that scripts add; and all places that one may lead to.
LINKS = """[[...document.querySelectorAll("a[href]")].map(each => each.href),
           [...document.querySelectorAll("[id]")].map(each => each.id)]"""
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# What is cut off at the right: a text that neither wraps nor scrolls.
CUT = """[...document.querySelectorAll("article :is(p, li, h1, h2, h3, table, pre, img)")]
  .filter(each => !each.closest(".md-typeset__scrollwrap, .highlight"))
  .filter(each => each.getBoundingClientRect().right > innerWidth).map(each => each.outerHTML)"""


def opened(browser: Any, address: str, scheme: Any, complaints: list[Any]) -> Any:
    """Open a page that tells what its console says and what it fetches from elsewhere."""
    page = browser.new_page(color_scheme=scheme)
    page.on("console", lambda said: complaints.append((said.text, said.location)))
    page.on("pageerror", lambda error: complaints.append((str(error), "")))
    page.on(
        "request",
        lambda asked: address in asked.url or complaints.append((asked.url, "asked")),
    )
    return page


def unnamed(session: Any) -> list[str]:
    """Give what a screen reader would meet on a page without a word about it."""
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    assert len(shown) > 20
    without = [node for node in shown if not node.get("name", {}).get("value")]
    return [node["role"]["value"] for node in without if node["role"]["value"] in NEED_NAMES]


def test_no_page_complains_or_is_hard_to_read(site: tuple[str, list[str], Path]) -> None:
    address, pages, _ = site
    assert len(pages) > 30
    wrong: list[tuple[str, object]] = []
    leads: dict[str, list[str]] = {}
    places: set[str] = set()
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = opened(browser, address, scheme, wrong)
            session = page.context.new_cdp_session(page)
            for name in pages:
                page.set_viewport_size({"width": 1280, "height": 900})
                answer = page.goto(address + name)
                assert answer is not None
                if answer.status != 200:
                    wrong.append((name, answer.status))
                page.add_style_tag(content="* { transition: none !important }")
                if unclear := page.evaluate(STRUCTURE) + unnamed(session):
                    wrong.append((name, f"not accessible: {unclear}"))
                leads[name], ids = page.evaluate(LINKS)
                places |= {address + name, *(f"{address}{name}#{each}" for each in ids)}
                for width in (1280, 400):
                    page.set_viewport_size({"width": width, "height": 900})
                    if page.evaluate(WIDTH) > 0 or page.evaluate(CUT):
                        wrong.append((name, f"wider than {width}: {page.evaluate(CUT)}"))
                    if pale := page.evaluate(CONTRAST):
                        wrong.append((name, f"pale, {scheme}, {width}: {json.dumps(pale)}"))
            page.close()
        browser.close()
    ours = {(name, link) for name, links in leads.items() for link in links if address in link}
    assert len(ours) > 1000
    wrong += [(name, link) for name, link in sorted(ours) if link.rstrip("#") not in places]
    assert wrong == []


@pytest.mark.parametrize("name", ["index.html", "api/data.html"])
@pytest.mark.parametrize("where", ["served", "on the disk"])
def test_the_search_finds_a_page_by_the_name_of_an_error(
    site: tuple[str, list[str], Path], where: str, name: str
) -> None:
    served, _, folder = site
    address = served if where == "served" else f"{folder.as_uri()}/"
    complaints: list[tuple[str, object]] = []
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = opened(browser, address, "light", complaints)
        page.goto(address + name)
        page.click("input.md-search__input")
        page.keyboard.type("NonFiniteLossError")
        page.click(f"a.md-search-result__link[href^='{address}errors.html']")
        page.wait_for_url(f"{address}errors.html*")
        assert "NonFiniteLossError" in page.inner_text("article")
        browser.close()
    assert complaints == []


def test_every_public_name_has_an_entry_of_its_own(site: tuple[str, list[str], Path]) -> None:
    """As it is built: what a docstring's directive names without finding it is left out there."""
    address, _, _ = site
    served = json.loads(urllib.request.urlopen(address + "search/search_index.json").read())
    shown = {entry["location"].partition("#")[2] for entry in served["docs"]}
    rooms = ("callbacks", "data", "distributed")
    names = [name for name in unisono.__all__ if name not in (*rooms, "__version__", "errors")]
    names += [f"{room}.{name}" for room in rooms for name in getattr(unisono, room).__all__]
    wanted = {f"unisono.{name}" for name in names}
    assert wanted <= shown
