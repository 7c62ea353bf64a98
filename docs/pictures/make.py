"""Make the pictures of the documentation again, and the notebook's outputs: ``make pictures``.

All are of real runs on this machine; a quiet one gives better ones.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from docs.pictures import curves
from nbclient import NotebookClient
from playwright.sync_api import sync_playwright
from rich.console import Console

from unisono.tools.cli.first_commands import FIRST, RECIPES
from unisono.tools.report.files import write_report
from unisono.tools.report.top import show

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[1] / "examples" / "notebook.ipynb"
RUN = "runs/digits"
FAULT = "kill:rank=1,step=100"


def main() -> None:
    """Train in an empty folder, draw there, write here."""
    curves.draw()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        draw_terminal()
        draw_report()
        execute_notebook(Path(folder) / "notebook")


def draw_terminal() -> None:
    """Show what a run says when a worker is killed, and ``unisono top`` beside it."""
    program = (RECIPES / f"{FIRST}.py").read_text()
    program = program.replace("# directory=", "directory=").replace("epochs=6", "epochs=12")
    Path("train.py").write_text(program)
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    console.print(f'$ UNISONO_FAULTS="{FAULT}" unisono run -n 2 train.py', highlight=False)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", "train.py"]
    environ = os.environ | {"UNISONO_FAULTS": FAULT}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        has_joined = False
        for line in job.stdout:
            console.print(line.rstrip(), highlight=False)
            if has_joined and line.startswith("epoch"):
                break
            has_joined = has_joined or "has joined" in line
        console.print(f"\n$ unisono top {RUN}    # in another terminal", highlight=False)
        show(RUN, console, once=True)
        job.stdout.read()
    picture = console.export_svg(title="unisono", unique_id="terminal")
    # Fonts are those of the reader: nothing is fetched from a network.
    (HERE / "terminal.svg").write_text(without_fonts(picture))


def without_fonts(picture: str) -> str:
    """Take out what would load a font, and name one that is everywhere."""
    while "@font-face" in picture:
        start = picture.index("@font-face")
        picture = picture[:start].rstrip() + picture[picture.index("}", start) + 1 :]
    return picture.replace("Fira Code, monospace", "monospace")


def draw_report() -> None:
    """Photograph the first part of the run's report, by day and by night."""
    page_file = write_report(RUN)
    browser_file = os.environ.get("UNISONO_TEST_BROWSER") or shutil.which("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_file, args=["--no-sandbox"])
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            page = browser.new_page(viewport={"width": 1000, "height": 1720}, color_scheme=scheme)
            page.goto(page_file.absolute().as_uri())
            page.wait_for_selector(".plot .main-svg")
            page.screenshot(path=HERE / name)
        browser.close()


def execute_notebook(folder: Path) -> None:
    """Run all cells and store what they show, with paths as a reader would have them."""
    folder.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    there = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, coalesce_streams=True, record_timing=False, resources=there)
    client.execute()
    text = nbformat.writes(notebook).replace(str(folder), "/home/you")
    NOTEBOOK.write_text(text + "\n")


if __name__ == "__main__":
    main()
