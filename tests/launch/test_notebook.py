"""``unisono.launch`` in a real notebook: a Jupyter kernel runs cells, and shows what they show."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.launch.conftest import lives
from tests.launch.kernels import Kernel
from tests.test_docs import DOCS, blocks

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
GONE_S = 30.0  # on a machine where others compute, too

DEFINITIONS = '''
import os, signal, sys, threading, time
import torch
import unisono

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

class Sums(torch.utils.data.Dataset):
    """Draws its samples, so that random numbers count too."""
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.randn(4)
        return x, x.sum(0, keepdim=True)

def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

def train(steps, each=lambda: None):
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_of(model, batch):
        each()
        return loss(model, batch)

    trainer = unisono.Trainer(model, optimizer, loss_of, shards=2, seed=0)
    return trainer.fit(Sums(64), batch_size=16, steps=steps).digest

def wait():
    print("waiting", flush=True)
    time.sleep(600)
'''


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give a working folder whose name has a space, and one for the kernel's own files."""
    working = tmp_path_factory.mktemp("my notebooks")
    return working, tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def kernel(folders: tuple[Path, Path]) -> Iterator[Kernel]:
    with Kernel(*folders) as kernel:
        kernel.fine(DEFINITIONS)
        kernel.fine("unisono.launch(unisono.world, workers=1)")  # starts the fork server
        yield kernel


def below(kernel: Kernel) -> list[psutil.Process]:
    return kernel.process.children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + GONE_S
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(lives, processes))


def test_training_from_cells_gives_the_same_digest_on_any_number_of_workers(kernel):
    shown = kernel.fine(
        "torch.manual_seed(0)\n"
        "digests = [unisono.launch(train, 20, workers=n) for n in (1, 2, 2)]\n"
        "len({digest for found in digests for digest in found}), digests[0] == [train(20)]"
    )
    assert shown.value == "(1, True)"
    assert len(re.findall("20 steps, 320 samples in .* digest", shown.stdout)) == 4
    # One line for each run, and that tells its end; the last is the kernel's own.
    assert len(shown.displays) == 4
    assert all("20/20 steps" in line for line in shown.displays.values())
    assert shown.stderr == ""


def test_the_cell_on_the_page_about_notebooks_runs(kernel):
    (cell,) = blocks(DOCS / "notebooks.md")
    assert kernel.value(f"{cell}\nlen(set(found)), len(found)") == "(1, 2)"


def test_what_workers_print_is_shown_by_the_cell_that_launched_them(kernel):
    kernel.fine(
        "def tell(name):\n"
        "    print(f'{name}: {unisono.world().rank}')\n"
        "    print(f'{name} went wrong', file=sys.stderr)"
    )
    for name in ("first", "second"):
        shown = kernel.fine(
            f"print('before'); unisono.launch(tell, {name!r}, workers=2); print('after')"
        )
        before, *told, after = shown.stdout.splitlines()
        assert (before, sorted(told), after) == ("before", [f"{name}: 0", f"{name}: 1"], "after")
        assert shown.stderr == f"{name} went wrong\n" * 2


def test_redefinitions_take_effect_in_workers_of_the_same_server(kernel):
    server = kernel.value("unisono.launch(os.getppid, workers=1)")
    for number in (1, 2):
        kernel.fine(f"factor = {number}\ndef used(): return 10 * factor")
        kernel.fine(f"class Kept:\n    def tell(self): return {number}\nkept = Kept()")
        assert kernel.value("unisono.launch(lambda: (used(), kept.tell()), workers=1)") == (
            f"[({10 * number}, {number})]"
        )
    kernel.fine("Kept.tell = lambda self: 'patched'")
    assert kernel.value("unisono.launch(lambda: Kept().tell(), workers=1)") == "['patched']"
    assert kernel.value("unisono.launch(os.getppid, workers=1)") == server


def test_a_module_beside_the_notebook_is_read_from_its_file_by_each_worker(kernel, folders):
    module = folders[0] / "beside.py"
    module.write_text("def number():\n    return 1\n")
    kernel.fine("import importlib, beside")
    assert kernel.value("unisono.launch(beside.number, workers=1)") == "[1]"
    module.write_text("def number():\n    return 22\n")
    assert kernel.value("unisono.launch(beside.number, workers=1), beside.number()") == "([22], 1)"
    kernel.fine("importlib.reload(beside)")
    assert kernel.value("unisono.launch(beside.number, workers=1), beside.number()") == "([22], 22)"


def test_variables_and_the_folder_are_those_of_the_moment(kernel, folders):
    kernel.fine("os.environ['UNISONO_TEST'] = 'set in a cell'")
    assert kernel.value("unisono.launch(os.environ.get, 'UNISONO_TEST', workers=1)") == (
        "['set in a cell']"
    )
    assert kernel.value("unisono.launch(os.getcwd, workers=1)") == f"[{str(folders[0])!r}]"


def test_an_exception_names_the_lines_of_the_cells(kernel):
    kernel.fine(
        "class Odd(Exception):\n    pass\n\n"
        "def inner():\n    if unisono.world().rank == 1:\n        raise Odd('very')\n\n"
        "def outer():\n    inner()"
    )
    shown = kernel.cell("x = 1\nunisono.launch(outer, workers=2)")
    assert shown.error == "Odd: very"
    assert "It was raised on worker 1 of 2" in shown.traceback
    assert re.search(r"Cell In\[\d+\], line 9, in outer\n +inner\(\)", shown.traceback)
    assert re.search(r"Cell In\[\d+\], line 6, in inner\n +raise Odd\('very'\)", shown.traceback)
    assert "----> 2 unisono.launch(outer, workers=2)" in shown.traceback
    assert len(shown.traceback.splitlines()) < 40
    caught = "try:\n    unisono.launch(outer, workers=2)\nexcept Odd as error:\n    caught = error"
    kernel.fine(caught)
    assert kernel.value("caught.__cause__.rank") == "1"


@pytest.mark.parametrize("first", ["pass", "import asyncio; await asyncio.sleep(0)"])
def test_the_stop_button_ends_all_workers_and_the_next_launch_works(kernel, first):
    before = set(below(kernel))
    cell = kernel.start(f"{first}\nunisono.launch(wait, workers=2)")
    kernel.until(cell, "waiting\nwaiting")
    kernel.interrupt()
    shown = kernel.shown(cell)
    assert shown.error == "KeyboardInterrupt: "
    assert all_gone([process for process in below(kernel) if process not in before])
    assert kernel.value("unisono.launch(lambda: 7, workers=2)") == "[7, 7]"


def test_launching_again_and_again_leaves_nothing_behind(kernel):
    kernel.fine(
        "import gc\n"
        "def owned():\n"
        "    paths = [f'/proc/self/fd/{name}' for name in os.listdir('/proc/self/fd')]\n"
        "    links = [os.readlink(path) for path in paths if os.path.islink(path)]\n"
        "    return sorted(link.split(':')[0] for link in links if '.sqlite' not in link)"
    )
    kernel.fine("unisono.launch(unisono.world, workers=2)")
    kernel.fine("gc.disable(); before = owned(), threading.active_count()")
    processes = below(kernel)
    kernel.fine("for _ in range(20): assert unisono.launch(lambda: 1, workers=2) == [1, 1]")
    kernel.fine("after = owned(), threading.active_count(); gc.enable()")
    # The kernel itself opens one or the other thing meanwhile; a leak would be of 20 at least.
    grown = "[x for x in after[0] if after[0].count(x) >= before[0].count(x) + 10]"
    assert kernel.value(grown) == "[]"
    assert kernel.value("after[1] < before[1] + 10") == "True"
    assert below(kernel) == processes


def test_a_killed_worker_is_made_up_for_and_the_cell_tells(kernel):
    kernel.fine(
        "def die_once(path):\n"
        "    if unisono.world().rank == 0 and not os.path.exists(path):\n"
        "        open(path, 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)"
    )
    shown = kernel.fine(
        "torch.manual_seed(0); whole = unisono.launch(train, 20, workers=1)\n"
        "torch.manual_seed(0)\n"
        "again = unisono.launch(train, 20, lambda: die_once('died'), workers=2)\n"
        "again == whole * 2"
    )
    assert shown.value == "True"
    assert "was killed by SIGKILL" in shown.stderr
    assert "has joined" in shown.stderr or "a replacement is starting" in shown.stderr
    assert len(shown.displays) == 2
    assert all("20/20 steps" in line for line in shown.displays.values())


def test_workers_inherit_nothing_of_the_kernel(kernel, folders):
    """As CUDA needs it: what has used it must not fork, and its workers must not be forks of it."""
    mark = folders[0] / "forked"
    kernel.fine(
        f"os.register_at_fork(after_in_child=lambda: open({str(mark)!r}, 'w').close())\n"
        "torch.cuda._initialized = torch.only_here = True\n"
        "reading, writing = os.pipe()"
    )
    fresh = "(lambda: (torch.cuda.is_initialized(), hasattr(torch, 'only_here')))"
    assert kernel.value(f"unisono.launch({fresh}, workers=1)") == "[(False, False)]"
    assert not mark.exists()
    kernel.fine("pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)")
    assert mark.exists(), "a fork of the kernel would have been seen"
    (server,) = below(kernel)
    theirs = set(descriptors(server)) - {os.devnull}
    assert theirs & set(descriptors(kernel.process)) <= inherited(server)
    kernel.fine("torch.cuda._initialized = False")


def descriptors(process: psutil.Process) -> list[str]:
    found = []
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return [name for name in found if not name.startswith("anon_inode:")]


def inherited(server: psutil.Process) -> set[str]:
    """Tell what a fork server takes over on purpose: standard error, for its last words."""
    return {os.readlink(f"/proc/{server.pid}/fd/2")}


@pytest.mark.long
def test_the_stop_button_while_the_fork_server_starts(folders):
    with Kernel(*folders) as kernel:
        kernel.fine(DEFINITIONS)
        for delay_s in (0.0, 0.1, 0.5):
            cell = kernel.start("print('now', flush=True); unisono.launch(wait, workers=2)")
            kernel.until(cell, "now")
            time.sleep(delay_s)  # any moment will do
            kernel.interrupt()
            assert kernel.shown(cell).error == "KeyboardInterrupt: "
        assert kernel.value("unisono.launch(lambda: 7, workers=2)") == "[7, 7]"


def told(notebook) -> list[str]:
    """Give the values that cells show and the lines of runs, up to what a processor changes."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [output.get("text") or output["data"]["text/plain"] for output in outputs]
    lines = r"^(True|epoch \d+: |\d+ steps, [\d,]+ samples)"
    return [line for text in texts for line in re.findall(lines, text, re.M)]


@pytest.mark.long
def test_the_example_tells_its_story_and_has_the_outputs_of_a_run(tmp_path):
    import nbclient  # not in every process of tests
    import nbformat

    stored = nbformat.read(EXAMPLE, as_version=4)
    assert EXAMPLE.stat().st_size < 20_000
    notebook = nbformat.from_dict(copy.deepcopy(stored))
    environ = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    there = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=100, coalesce_streams=True, resources=there)
    client.execute(env=environ | {"IPYTHONDIR": str(tmp_path)})
    shown = nbformat.writes(notebook)
    whole, part = r"135 steps, .* digest (\w+)", r"100 steps, .* digest (\w+)"
    assert len(set(re.findall(whole, shown))) == 1
    assert set(re.findall(part, shown)).isdisjoint(re.findall(whole, shown))
    assert told(notebook).count("True") == 3
    assert "was killed by SIGKILL" in shown
    assert "resuming from checkpoint step-000000000100" in shown
    assert 'src=\\"runs/killed/report.html\\"' in shown
    assert "<svg" in (tmp_path / "runs/killed/report.html").read_text()
    assert told(stored) == told(notebook)
