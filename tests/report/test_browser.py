"""The pages in a real browser: drawn, silent, without a request, narrow and wide, day and night."""

import os
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.report.synthetic import run_lines, start_line, step_line, write_run

from unisono.tools.report.files import write_comparison, write_report

BROWSER = os.environ.get("UNISONO_TEST_BROWSER") or shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium: apt-get install chromium"),
]
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
PLOTTED = "document.querySelectorAll('.plot .main-svg').length"
DRAWN = """[...document.querySelectorAll('.plot')].map(plot => ({
  title: plot.getAttribute('aria-label'),
  curves: plot.querySelectorAll('.scatterlayer .js-line').length,
  bars: plot.querySelectorAll('.barlayer .point').length,
  rows: [...plot.querySelectorAll('.ytick text')].map(text => text.textContent),
}))"""


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """A browser keeps processes of its own from test to test; they end with it."""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        flags += ["--disable-component-update", "--disable-sync"]
        browser = driver.chromium.launch(executable_path=BROWSER, args=flags)
        yield browser
        browser.close()


class Watched:
    """Pages of a browser, what they said on the console, and what they asked for."""

    def __init__(self, browser):
        self.browser = browser
        self.said, self.asked, self.num_opened = [], [], 0

    def open(self, path, *, width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        page = self.browser.new_page(viewport=size, color_scheme=scheme)
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: self.said.append(dialog.message))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto("file://" + quote(str(path)))
        page.wait_for_function(f"() => {PLOTTED} >= 3 * document.querySelectorAll('.plot').length")
        self.num_opened += 1
        return page

    def check_silence(self):
        assert self.said == []
        assert {url.split(":")[0] for url in self.asked} <= {"file", "data", "blob"}
        assert sum(url.startswith("file:") for url in self.asked) == self.num_opened


@pytest.fixture
def opened(browser):
    """Open a page; in the end nothing was said on its console, and nothing was asked for."""
    watched = Watched(browser)
    pages = []

    def opened(*args, **options):
        pages.append(watched.open(*args, **options))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
    watched.check_silence()


@pytest.fixture(scope="module")
def usual(browser, tmp_path_factory):
    """The page of a run in which all went as usual, opened once."""
    path = write_report(write_run(tmp_path_factory.mktemp("runs") / "a run"))
    watched = Watched(browser)
    return watched, watched.open(path)


def drawn(page):
    return {plot["title"]: plot for plot in page.evaluate(DRAWN)}


def test_curves_and_phases_are_drawn(usual):
    watched, page = usual
    plots = drawn(page)
    assert plots["loss"]["curves"] == 2  # training, validation
    assert plots["Samples per second"]["curves"] == 1
    assert plots["Learning rate"]["curves"] == 1
    assert plots["Over the run"]["bars"] > 500
    assert sorted(plots["By worker"]["rows"]) == ["worker 0", "worker 1", "worker 2", "worker 3"]
    assert plots["By worker"]["bars"] == 4 * 6
    watched.check_silence()


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_as_wide_as_the_window(usual, width):
    watched, page = usual
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    cut = (
        "[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth)"
    )
    assert page.evaluate(f"{cut}.map(one => one.textContent)") == []
    watched.check_silence()


def test_colours_follow_the_scheme_while_the_page_is_open(usual):
    watched, page = usual
    paper = "document.querySelector('.plot .main-svg').style.background"
    by_day = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => {paper} !== '{by_day}'")
    assert (by_day, page.evaluate(paper)) == ("rgb(255, 255, 255)", "rgb(20, 23, 27)")
    watched.check_silence()


def test_a_legend_hides_a_curve_in_any_colours(usual):
    _, page = usual
    page.locator(".plot").first.locator(".legendtoggle").last.click()
    page.wait_for_timeout(500)  # it waits for a second click
    page.emulate_media(color_scheme="light")
    page.wait_for_timeout(500)
    assert drawn(page)["loss"]["curves"] == 1


def test_the_policy_stops_what_a_page_must_not_do(usual):
    _, page = usual  # the last to use it: its console is no longer silent
    refused = page.evaluate(
        """() => new Promise(resolve => {
             const refused = [];
             document.addEventListener('securitypolicyviolation', event => {
               refused.push(event.effectiveDirective);
               if (refused.length === 2) resolve(refused.sort());
             });
             setTimeout(() => resolve(refused), 5000);
             const script = document.createElement('script');
             script.textContent = 'document.title = "taken"';
             document.body.append(script);
             fetch('https://example.org/').catch(() => null);
           })"""
    )
    assert refused == ["connect-src", "script-src-elem"]
    assert page.title() != "taken"


def test_words_out_of_the_file_are_shown_as_text(tmp_path, opened):
    lines = list(run_lines(num_steps=20, lost_at=10, fails=True))
    lines[0]["command"] = ["python", ATTACK]
    lines[0]["identity"][ATTACK] = {ATTACK: ATTACK}
    for line in lines:
        if line["event"] == "step":
            line["means"][ATTACK] = 1.0
        if line["event"] == "workers":
            line["why"] = [ATTACK]
        if line["event"] == "failure":
            line["message"] = ATTACK
    path = write_report(write_run(tmp_path, lines))
    assert path.read_text().count(ATTACK) == 0
    page = opened(path)
    assert page.locator("main img, main script").count() == 0
    assert page.locator("td", has_text=ATTACK).count() >= 3
    assert page.locator("h3", has_text=ATTACK[:50]).count() == 1


def test_numbers_that_are_none_have_a_page(tmp_path, opened):
    step = step_line(0, ranks=[0], phases=[[0.001] * 6], seconds=0.01)
    step |= {"means": {"loss": "nan"}, "learning_rates": ["inf"], "gradient_norm": "nan"}
    page = opened(write_report(write_run(tmp_path, [start_line(), step])), width=400)
    assert "cannot be drawn" not in page.locator("main").inner_text()


def test_runs_are_drawn_together(tmp_path, opened):
    runs = [write_run(tmp_path / name, num_workers=n) for name, n in [("a", 2), ("b", 3)]]
    path = write_comparison(runs, tmp_path / "compare.html")
    page = opened(path, width=400)
    assert drawn(page)["loss"]["curves"] == 4
    assert "All digests are equal" in page.locator("header").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert Path(path).stat().st_size < 8_000_000


def test_a_plot_is_saved_as_svg(tmp_path, usual):
    _, page = usual
    page.hover(".plot >> nth=0")
    with page.expect_download() as download:
        page.click(".modebar-btn >> nth=0")
    download.value.save_as(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<svg")
