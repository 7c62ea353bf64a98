"""The documentation's site builds without a warning and works in a browser, without a network."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
BROWSER = os.environ.get("UNISONO_TEST_BROWSER") or shutil.which("chromium")
playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("mkdocs", reason="`make docs` installs what builds the site")

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Build the site and serve it to this host; gives its address and its pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        pages = sorted(str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}/", pages
        server.shutdown()
        serving.join()


def test_no_page_complains_or_is_too_wide(site: tuple[str, list[str]]) -> None:
    address, pages = site
    assert len(pages) > 30
    wrong: list[tuple[str, object]] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (400, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.on("console", lambda said: wrong.append((said.text, said.location)))
            page.on("pageerror", lambda error: wrong.append((str(error), "")))
            page.on(
                "request",
                lambda asked: asked.url.startswith(address) or wrong.append((asked.url, "asked")),
            )
            for name in pages:
                answer = page.goto(address + name)
                assert answer is not None
                if answer.status != 200:
                    wrong.append((name, answer.status))
                root = "document.documentElement"
                if page.evaluate(f"{root}.scrollWidth > {root}.clientWidth"):
                    wrong.append((name, f"wider than {width}"))
            if width == 1280:  # the search finds a page by an error's name
                page.fill("input.md-search__input", "NonFiniteLossError")
                page.wait_for_selector(".md-search-result__link")
        browser.close()
    assert wrong == []
