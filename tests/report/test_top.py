"""The command shows a run that somebody trains, and leaves its folder alone."""

import html
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from click.testing import CliRunner
from tests.chaos.jobs import gone_within
from tests.report.lines import event, step
from tests.report.synthetic import run_lines, start_line, to_bytes, write_run
from tests.warm import processes
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.tools.cli import main
from unisono.tools.report.top import LiveView
from unisono.tools.report.view import Condition


def top(*arguments):
    return CliRunner().invoke(main, ["top", *map(str, arguments)])


def train(directory):
    x = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = unisono.Trainer(
        model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), shards=2, directory=directory
    )
    trainer.fit(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=10, epochs=2)
    return trainer.digest()


@pytest.mark.slow
def test_a_real_run_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "/somewhere/train.py", "--quick"])
    digest = train(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    result = top("--once", tmp_path)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("train.py --quick · ended, ")
    assert lines[1].startswith("step 24 of 24 · epoch 2 of 2 ")
    assert lines[1].endswith(" 100 %")
    assert "samples/s · learning rate 0.05" in lines[2]
    assert f"digest {digest[:16]}" in result.output
    worker = next(line for line in lines if line.startswith("   0 "))
    assert worker.split()[1:3] == [str(os.getpid()), "running"]
    assert "MiB" in worker or "GiB" in worker
    assert max(map(len, lines)) <= 80
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("start", [[], ["-m", "unisono", "run", "-n", "2"]], ids=str)
def test_a_run_that_is_killed_is_gone_with_its_last_process(tmp_path, start):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, tests.report.test_top as here\n"
        "cross_entropy = here.F.cross_entropy\n"
        "here.F.cross_entropy = lambda *a: (time.sleep(0.1), cross_entropy(*a))[1]\n"
        "here.train(os.path.dirname(__file__))\n"
    )
    watch = LiveView(tmp_path)
    with processes.start([sys.executable, *start, script], start_new_session=True) as process:
        while not (view := watch.current()).num_done:
            assert process.poll() is None
            time.sleep(0.01)
        workers = [psutil.Process(worker.pid) for worker in view.workers]
        assert view.condition is Condition.RUNNING
        process.kill()
        process.wait()
        assert gone_within([one for one in workers if one.pid != process.pid], 10.0) == []
        assert watch.current().condition is Condition.GONE


def test_the_picture_on_the_page_has_the_columns_that_are_drawn(tmp_path):
    picture = Path(__file__).parents[2] / "docs" / "pictures" / "terminal.svg"
    shown = [html.unescape(one) for one in re.findall(r">([^<]+)</text>", picture.read_text())]
    words = " ".join(shown).replace("\xa0", " ").split()
    at, end = words.index("rank"), words.index("memory") + 1
    drawn = top("--once", write_run(tmp_path / "run")).output.splitlines()
    (heads,) = [line.split() for line in drawn if line.lstrip().startswith("rank ")]
    assert words[at:end] == heads


def test_what_slows_the_newest_steps_is_shown(tmp_path):
    shown = LiveView(write_run(tmp_path / "run", ends=False)).current()
    assert shown.slowness.startswith("worker 2 is slow in its passes: ")
    assert [worker.is_slow for worker in shown.workers] == [False, False, True, False]


def test_a_pipe_with_colours_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = top(write_run(tmp_path / "run", [start_line(), step(0, 1)]))
    assert result.exit_code == 0
    assert "\x1b[1m" in result.output
    assert "\x1b[?1049h" not in result.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no events yet: wait until it has begun"),
        (b"\x00\xff\n[1]\n{}\n", "has no events yet: wait until it has begun"),
        (b'{"event":"start","format":99,"step":0}\n', "use the version that wrote it"),
    ],
)
def test_a_file_that_tells_nothing_gets_one_sentence(tmp_path, content, words):
    (tmp_path / "events.jsonl").write_bytes(content)
    result = top("--once", tmp_path)
    assert result.exit_code == 2
    assert words in result.output


class TestLiveView:
    @pytest.fixture
    def watch(self, tmp_path):
        return LiveView(tmp_path, host="another")

    @pytest.fixture
    def file(self, tmp_path):
        return tmp_path / "events.jsonl"

    def test_a_run_that_has_not_begun_is_awaited(self, watch, file):
        assert watch.current().condition is Condition.AWAITED
        file.write_bytes(b"")
        assert watch.current().condition is Condition.AWAITED
        file.write_bytes(to_bytes(start_line())[:50])
        assert watch.current().condition is Condition.AWAITED

    def test_a_file_that_was_replaced_is_read_anew(self, watch, file):
        head = to_bytes(start_line()) + to_bytes(step(0, 1))
        lost = event("workers", 2, ranks=[0], lost=[1], joined=[], pids=[], why=["x"])
        kept = to_bytes(event("checkpoint", 2))
        file.write_bytes(head + to_bytes(step(1, 2)) + kept + to_bytes(step(2, 3)))
        assert watch.current().num_done == 3
        file.write_bytes(head + to_bytes(lost) + to_bytes(event("went_back", 1, from_step=3)))
        view = watch.current()
        assert (view.num_done, view.kept) == (1, ())
        assert view.trouble.startswith("x; steps 1 to 2 were repeated, ")

    def test_another_run_in_the_folder_is_another(self, watch, file):
        file.write_bytes(to_bytes(start_line(end_step=5)) + to_bytes(step(0, 1)))
        assert watch.current().end_step == 5
        file.rename(file.with_stem("events-1"))
        assert watch.current().condition is Condition.AWAITED
        file.write_bytes(to_bytes(start_line(end_step=7)))
        view = watch.current()
        assert (view.num_done, view.end_step) == (0, 7)

    def test_a_long_file_is_known_by_its_end(self, watch, file):
        lines = run_lines(num_steps=2000, num_workers=2, lost_at=20)
        compact = [json.dumps(line, separators=(",", ":")) for line in lines]
        file.write_text("\n".join([*compact, ""]))
        view = watch.current()
        assert view.num_done == 2000
        assert len(watch._status.recent) < 200
        assert "worker 1 was killed by SIGKILL" in view.trouble
        assert view.condition is Condition.ENDED

    def test_processes_are_believed_on_their_own_host_alone(self, tmp_path, file):
        mine = {"ranks": [0], "pids": [os.getpid()], "host": "here"}
        file.write_bytes(to_bytes(start_line(num_workers=1, **mine, time_unix_s=time.time())))
        here, there = (
            LiveView(tmp_path, host=host).current().workers[0] for host in ("here", "there")
        )
        assert here.state == "running"
        assert there.state == "unknown"


def read_until(terminal, words, seen=b""):
    while words not in seen:
        seen += os.read(terminal, 1 << 16)
    return seen


@contextmanager
def on_a_terminal(directory):
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    command = [sys.executable, "-m", "unisono", "top", str(directory)]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_on_a_terminal_it_is_live_and_gives_the_terminal_back(tmp_path, by):
    write_run(tmp_path, [start_line(), step(0, 1)])
    with on_a_terminal(tmp_path) as (process, terminal):
        seen = read_until(terminal, b"step 1 of 300")
        assert b"\x1b[?1049h" in seen  # the other screen
        assert b"\x1b[?25l" in seen  # no cursor
        with (tmp_path / "events.jsonl").open("ab") as file:
            file.write(to_bytes(step(1, 2)))
        read_until(terminal, b"step 2 of 300")
        process.send_signal(by)
        seen = read_until(terminal, b"\x1b[?1049l")
        after = read_until(terminal, b"step 2 of 300", seen.partition(b"\x1b[?1049l")[2])
        assert b"\x1b[?25h" in seen + after
        assert process.wait() == 0


@pytest.mark.slow
def test_on_a_terminal_it_waits_for_a_run_and_ends_with_it(tmp_path):
    with on_a_terminal(tmp_path) as (process, terminal):
        read_until(terminal, b"waiting for the run to begin")
        write_run(tmp_path, run_lines(num_steps=40))
        read_until(terminal, b"digest 0123456789abcdef")
        assert process.wait() == 0


def test_a_directory_that_no_run_has_made_yet_is_waited_for(tmp_path, monkeypatch, capsys):
    from unisono.tools.report import top

    looked = []
    monkeypatch.setattr(top, "_show_live", lambda watch, console: looked.append(watch.current()))
    monkeypatch.setattr(top, "draw", lambda view, console: "")
    console = SimpleNamespace(
        file=SimpleNamespace(isatty=lambda: True), is_dumb_terminal=False, print=lambda *_: None
    )
    top.show(tmp_path / "not yet", console, once=False)
    assert "waiting for" in capsys.readouterr().err
    assert looked[0].condition is Condition.AWAITED
    (tmp_path / "a file").touch()
    with pytest.raises(ValueError, match="DIRECTORY must be a run's folder"):
        top.show(tmp_path / "a file", console, once=False)
