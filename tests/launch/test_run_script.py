"""``unisono run``: a script sees what plain Python shows it; every way to end is explained."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from tests.launch.conftest import PROGRAMS, Run
from tests.promises import promise

pytestmark = pytest.mark.slow


def test_a_script_finds_what_plain_python_would_set(unisono_run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(PROGRAMS / "show.py", folder / "my script.py")
    arguments = ["a folder/my script.py", "--n", "-n", "3", "x y"]
    plain = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    done = unisono_run("-n", 2, "--threads", 2, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    expected = json.loads(plain.stdout)
    seen = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda s: s["rank"])
    for rank, one in enumerate(seen):
        for what in ("argv", "file", "name", "is_main", "spec", "path", "folder"):
            assert one[what] == expected[what], what
        assert (one["rank"], one["size"], one["threads"], one["omp"]) == (str(rank), "2", 2, "2")
    assert seen[0]["draws"] == seen[1]["draws"]


def test_a_module_finds_what_plain_python_would_set(unisono_run: Run, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PROGRAMS / "show.py", package / "show.py")
    arguments = ["-m", "package.show", "-m", "--x"]
    plain = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    done = unisono_run("-n", 1, *arguments, cwd=tmp_path)
    expected, seen = json.loads(plain.stdout), json.loads(done.stdout)
    for what in ("argv", "file", "name", "is_main", "spec", "path", "folder"):
        assert seen[what] == expected[what], what


def test_a_folder_and_an_archive_find_what_plain_python_would_set(
    unisono_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "app").mkdir()
    shutil.copy(PROGRAMS / "show.py", tmp_path / "app" / "__main__.py")
    zipapp.create_archive(tmp_path / "app")
    for name in ("app", "app.pyz"):
        plain = subprocess.run(
            [sys.executable, name, "-x"], capture_output=True, text=True, cwd=tmp_path, check=True
        )
        done = unisono_run("-n", 1, name, "-x", cwd=tmp_path)
        expected, seen = json.loads(plain.stdout), json.loads(done.stdout)
        for what in ("argv", "file", "name", "is_main", "spec", "path", "folder"):
            assert seen[what] == expected[what], (name, what)


def test_two_runs_draw_different_numbers(unisono_run: Run) -> None:
    draws = [
        json.loads(unisono_run("-n", 1, PROGRAMS / "show.py").stdout)["draws"] for _ in range(2)
    ]
    assert draws[0] != draws[1]


def test_what_a_program_says_as_it_exits_is_shown_once(unisono_run: Run, tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text("raise SystemExit('out of beer')")
    done = unisono_run("-n", 2, script)
    assert done.returncode == 1
    assert "left with exit status 1" in done.stderr
    assert done.stderr.endswith(":\nout of beer\n")
    assert done.stderr.count("unisono: ") == 1


def test_the_traceback_is_the_one_of_plain_python(unisono_run: Run, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import json\n\ndef f():\n    json.loads('{')\n\nf()\n")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    done = unisono_run("-n", 2, script)
    assert done.stderr.endswith(plain.stderr)
    assert "(the same on rank" in done.stderr
    assert done.returncode == plain.returncode == 1


def test_open_files_threads_and_exit_callbacks_are_finished(
    unisono_run: Run, tmp_path: Path
) -> None:
    done = unisono_run("-n", 2, PROGRAMS / "leave_file.py", tmp_path)
    assert (done.stderr, done.returncode) == ("", 0)
    assert sorted(done.stdout.split()) == ["bye", "bye", "sent", "sent"]
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == "written by a thread"
        assert gzip.decompress((tmp_path / f"{rank}.gz").read_bytes()) == b"zipped"


@pytest.mark.parametrize(
    "end",
    ["5", "raise", *(pytest.param(n, marks=pytest.mark.long) for n in ("0", "words", "hook"))],
)
def test_a_process_that_a_worker_forks_ends_as_it_would_anywhere(
    unisono_run: Run, end: str
) -> None:
    program = [PROGRAMS / "fork.py", end]
    plain = subprocess.run(
        [sys.executable, *map(str, program)], capture_output=True, text=True, check=False
    )
    done = unisono_run("-n", 1, *program)
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode)
    assert done.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert "worker" not in done.stderr


@promise("open-ports.1")
def test_no_network_socket_and_no_file_exists_while_a_job_runs(running, tmp_path: Path) -> None:
    job = running(env={**os.environ, "TMPDIR": str(tmp_path)})
    for process in job.all:
        assert process.net_connections(kind="inet") == []
        assert "/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text()
    assert _files_under(tmp_path) == []
    job.launcher.send_signal(signal.SIGTERM)
    job.launcher.wait(30)
    assert _files_under(tmp_path) == []


@pytest.mark.parametrize(
    ("signum", "status", "line"),
    [
        (signal.SIGINT, 130, "unisono: interrupted by Ctrl-C; all 2 workers were ended.\n"),
        (signal.SIGTERM, 143, "unisono: interrupted by SIGTERM; all 2 workers were ended.\n"),
    ],
)
def test_an_interrupt_ends_everything(running, signum, status, line) -> None:
    job = running()
    if signum == signal.SIGINT:
        os.killpg(job.launcher.pid, signum)  # as a terminal does
    else:
        job.launcher.send_signal(signum)
    assert job.launcher.wait(30) == status
    assert job.all_go()
    assert job.launcher.communicate() == ("", line)


def test_an_interrupt_while_torch_still_loads_ends_everything_too(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("print('started')")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "unisono", "run", "-n", "2", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text():
        assert launcher.poll() is None
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
    out, err = launcher.communicate(timeout=30)
    assert (out, launcher.returncode) == ("", 130)
    assert err == "unisono: interrupted by Ctrl-C; all 2 workers were ended.\n"


def test_a_worker_holds_no_descriptor_of_another(unisono_run: Run, tmp_path: Path) -> None:
    # All requests are there when torch has been loaded, with the descriptors of all ranks.
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os\n"
        "folder = '/proc/self/fd/'\n"
        "paths = [folder + fd for fd in os.listdir(folder)]\n"
        "kinds = [os.readlink(path).split(':')[0] for path in paths if os.path.lexists(path)]\n"
        "print(json.dumps(sorted(kinds)))\n"
    )
    done = unisono_run("-n", 3, script, stdin=subprocess.DEVNULL)
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    page_and_its_mapping, store, channel = ["/memfd", "/memfd"], ["/memfd"], ["socket"]
    assert seen == [["/dev/null", *page_and_its_mapping, *store, "pipe", "pipe", *channel]] * 3


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("<&-", ">&-", "2>&-", "<&- >&-")),
    ],
)
def test_closed_standard_descriptors_change_nothing_else(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "ok.py"
    script.write_text(
        "import os, sys\n"
        "print('out', flush=True)\n"
        "print('err', file=sys.stderr)\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').write(repr(sys.stdin.read()))\n"
    )
    words = [sys.executable, "-m", "unisono", "run", "-n", "2", str(script)]
    command = f"exec {shlex.join(words)} {closed}"
    done = subprocess.run(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    out, err = "" if " >&-" in f" {closed}" else "out\n", "" if "2>" in closed else "err\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, out * 2, err * 2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["''"] * 2


def _files_under(folder: Path) -> list[Path]:
    # Folders do not count: torch 2.13 makes an empty one, torchinductor_USER, with any optimizer.
    return [path for path in folder.rglob("*") if not path.is_dir()]


@pytest.mark.parametrize("flags", [[], ["--traceback"]])
def test_an_error_of_ours_shows_the_programs_line_and_folds_our_frames(
    unisono_run: Run, tmp_path: Path, flags: list[str]
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch, unisono\n"
        "model = torch.nn.Linear(2, 1)\n"
        "trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1),\n"
        "                          lambda model, batch: model(batch[0]))\n"
        "data = torch.utils.data.TensorDataset(torch.zeros(8, 2))\n"
        "trainer.fit(data, batch_size=4, epochs=1)\n"
    )
    done = unisono_run("-n", 1, *flags, script)
    assert done.returncode == 1
    assert "trainer.fit(data, batch_size=4, epochs=1)" in done.stderr
    assert ("frames of Unisono left out" in done.stderr) == (not flags), done.stderr
    assert ("unisono/training/fit.py" in done.stderr) == bool(flags)


def test_an_error_in_a_function_that_is_launched_folds_our_frames_too(tmp_path: Path) -> None:
    script = tmp_path / "launches.py"
    script.write_text(
        "import torch, unisono\n"
        "def main():\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    trainer = unisono.Trainer(model, optimizer, lambda model, batch: None, shards=2)\n"
        "    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))\n"
        "    trainer.fit(data, batch_size=4, epochs=1)\n"
        "if __name__ == '__main__':\n"
        "    unisono.launch(main, workers=2)\n"
    )
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "trainer.fit(data, batch_size=4, epochs=1)" in done.stderr
    assert "frames of Unisono left out" in done.stderr
    assert "unisono/training/" not in done.stderr
