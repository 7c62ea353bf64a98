import errno
import io
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.text import Text
from tests.promises import promise

from unisono.callbacks import Progress
from unisono.runtime.console import Output
from unisono.runtime.launch.cell import DisplayState
from unisono.training.callbacks.progress import Bar, Lines, display
from unisono.training.callbacks.summary import Summary


def console(width=80, **options):
    environ = {"TERM": "xterm"}
    return Console(file=io.StringIO(), width=width, **{"_environ": environ, **options})


def frames(bar_console):
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", bar_console.file.getvalue())
    return [line.strip() for line in re.split(r"[\r\n]", text) if line.strip()]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


FIRST = DisplayState(1, 10, 0.5, 1, 32, 0, 0.5)


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind():
    terminal = console(force_terminal=True)
    bar = Bar(terminal)
    bar.start(DisplayState(0, 10))
    before_the_first_step = terminal.file.getvalue()
    assert "0/10" in before_the_first_step
    assert "nan" not in before_the_first_step
    assert "samples/s" not in before_the_first_step
    bar.show(FIRST)
    bar.say("epoch 1: validation loss 0.1")
    bar.stop(FIRST)
    text = terminal.file.getvalue()
    assert "epoch 1 " in text  # as in the line of its validation
    assert "loss 0.5000" in text
    assert "validation loss 0.1" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def test_the_cursor_stays_visible_as_whoever_hides_it_may_be_killed(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    output = Output()
    output.file = io.StringIO()
    bar = Bar(output)
    bar.start(DisplayState(0, 10))
    bar.stop(FIRST)
    assert "0/10" in output.file.getvalue()
    assert "\x1b[?25l" not in output.file.getvalue()


def test_errors_that_go_to_a_file_are_not_printed_beside_the_bar(monkeypatch):
    terminal, file = console(force_terminal=True), io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    bar = Bar(terminal)
    bar.start(DisplayState(0, 10))
    print("a warning", file=sys.stderr)
    bar.stop(FIRST)
    assert file.getvalue() == "a warning\n"
    assert "a warning" not in terminal.file.getvalue()


def test_a_terminal_that_says_it_has_no_columns_is_printed_on(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    output = Output()
    output.print("a table", "and", Text("a line"))
    assert (capsys.readouterr().out, output.width) == ("a table and a line\n", 80)


@pytest.mark.parametrize("width", [200, 80, 40])
def test_a_narrow_terminal_gets_one_line_too(width):
    terminal = console(width, force_terminal=True)
    bar, state = Bar(terminal), DisplayState(812, 2814, 0.25, 1, 800, 1, 0.1234)
    bar.start(DisplayState(811, 2814))
    bar.show(state)
    bar.stop(state)
    frame = frames(terminal)[-1]
    assert "epoch 2  " in frame
    assert "812/2,814 steps" in frame
    assert len(frame) <= width
    assert ("━" in frame) == (width > 70)
    assert ("left" in frame) == (width > 100)


class Fit:
    """A run of one worker, for what shows it."""

    def __init__(self, make, is_first=lambda: True, clock=None):
        self.step, self.end_step = 0, 10
        self._is_first = is_first
        self.progress = Progress(make, clock or Clock())

    @property
    def is_first(self):
        return self._is_first()

    def begin(self, step=0, end_step=10):
        self.step, self.end_step = step, end_step
        self.progress.on_begin(self)

    def do(self, number=None, epoch=0, loss=0.5, num_samples=32):
        self.step = (self.step if number is None else number) + 1
        step = {"number": self.step - 1, "epoch": epoch, "means": {"loss": loss}}
        self.progress.on_step_end(self, SimpleNamespace(num_samples=num_samples, **step))

    def say(self, line):
        self.progress.say(self, line)

    def end(self):
        self.progress.on_end(self, None)


def test_other_outputs_get_plain_lines():
    out = io.StringIO()
    fit = Fit(lambda: Lines(Console(file=out)))
    fit.begin()
    fit.do()
    fit.say("a [line] that is longer than the width of any terminal " * 3)
    fit.end()
    assert out.getvalue() == "a [line] that is longer than the width of any terminal " * 3 + "\n"


def test_a_long_run_says_after_10_s_and_every_half_minute_how_far_it_is():
    log, clock = console(), Clock()
    fit = Fit(lambda: Lines(log), clock=clock)
    fit.begin(2000, 2814)
    for step in range(100):  # of one second
        clock.now += 1
        fit.do(epoch=1, loss=1 / (step + 1), num_samples=3455)
    fit.end()
    assert log.file.getvalue().splitlines() == [
        "epoch 2, step 2,010 of 2,814: loss 0.1000, 3,455 samples/s",
        "epoch 2, step 2,040 of 2,814: loss 0.0250, 3,455 samples/s",
        "epoch 2, step 2,070 of 2,814: loss 0.0143, 3,455 samples/s",
        "epoch 2, step 2,100 of 2,814: loss 0.0100, 3,455 samples/s",
    ]


class Screen:
    """What one worker has shown."""

    every_s = 0.0

    def __init__(self, seen):
        self._seen = seen

    def start(self, state):
        self._seen.append(f"start {state.done}/{state.total}")

    def show(self, state):
        self._seen.append("step")

    def say(self, line):
        self._seen.append(line)

    def stop(self, state):
        self._seen.append("stop")


class Team:
    """Workers that all do the same; the first of them shows it."""

    def __init__(self, num_workers):
        self.first = 0
        self.seen = [[] for _ in range(num_workers)]
        self.fits = [self.fit(rank) for rank in range(num_workers)]

    def fit(self, rank):
        return Fit(lambda: Screen(self.seen[rank]), lambda: rank == self.first)

    def all(self, act, *arguments):
        for fit in self.fits:
            act(fit, *arguments)


def test_who_comes_first_goes_on_where_the_other_was():
    team = Team(2)
    team.all(Fit.begin, 2)
    for _ in range(3):
        team.all(Fit.do)
    team.first = 1
    team.all(Fit.do)
    team.all(Fit.end)
    assert team.seen[0] == ["start 2/10", "step", "step", "step", "stop"]
    assert team.seen[1] == ["start 5/10", "step", "stop"]


def test_steps_that_come_again_are_not_counted_again():
    team = Team(1)
    team.all(Fit.begin)
    for number in (0, 1, 2, 1, 2, 3):
        team.all(Fit.do, number)
    assert team.seen[0] == ["start 0/10", "step", "step", "step", "step"]


def test_a_replacement_that_comes_first_begins_where_the_run_is():
    team = Team(1)
    team.fits[0].begin()
    team.fits[0].do()
    team.first = 1
    replacement = team.fit(0)
    replacement.begin()
    team.first = 0
    replacement.do(7)
    replacement.end()
    assert team.seen[0] == ["start 0/10", "step", "start 7/10", "step", "stop"]


class Broken(io.StringIO):
    """Takes nothing."""

    def __init__(self, code):
        super().__init__()
        self._code = code

    def write(self, text):
        raise OSError(self._code, os.strerror(self._code))

    def isatty(self):
        return self._code == errno.EIO


@promise("nothing-lost.13")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EIO], ids=os.strerror)
def test_a_run_that_cannot_be_shown_goes_on_and_is_told_of_once(code, monkeypatch, capsys):
    monkeypatch.setattr(Bar, "every_s", 0.0)
    monkeypatch.setattr(sys, "stdout", Broken(code))
    monkeypatch.setenv("TERM", "xterm")
    fit = Fit(display)
    fit.begin(0, 3)
    for _ in range(3):
        fit.do()
        fit.say("a line")
    fit.end()
    fit.begin(3, 4)
    fit.say("another line")
    fit.end()
    assert capsys.readouterr().err == (
        f"unisono: standard output cannot be written ({os.strerror(code)}); "
        f"training continues without progress output.\n"
    )


@pytest.mark.parametrize("make", [Lines, Bar])
@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "5.9 × ? 2"), ("ascii", "5.9 ? ? 2")])
def test_letters_that_an_output_lacks_end_no_run(make, encoding, shown):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    shower = make(Console(file=out, force_terminal=make is Bar, _environ={"TERM": "xterm"}))
    shower.start(DisplayState(0, 10))
    shower.show(FIRST)
    shower.say("5.9 × → 2")
    shower.stop(FIRST)
    assert shown in raw.getvalue().decode(encoding)


def test_what_is_said_outside_of_a_run_is_a_line_and_no_more():
    team = Team(1)
    (fit,) = team.fits
    fit.say("going on from a checkpoint")
    fit.end()
    assert team.seen == [["going on from a checkpoint"]]
    fit.begin(0, 1)
    fit.end()
    fit.say("over")
    fit.end()
    assert team.seen[0][1:] == ["start 0/1", "stop", "over"]


def test_a_bar_needs_a_terminal_that_can_redraw():
    assert isinstance(display(console(force_terminal=True)), Bar)
    assert isinstance(display(console()), Lines)
    assert isinstance(display(), Lines)
    dumb = console(force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(display(dumb), Lines)


def test_a_summary_names_what_it_did():
    summary = Summary(10, 320, 2.0, 4, 2, "ab" * 32, {"loss": 0.1}, None)
    assert str(summary) == (
        "10 steps, 320 samples in 2.0 s: 160 samples/s, 4 shards on 2 workers, "
        "digest abababababababab"
    )
    assert " 2 workers (1 at the end), " in str(replace(summary, workers_at_end=1))


def test_a_display_that_fails_in_any_way_is_told_once_and_shows_nothing_more(capsys):
    class Broken(Screen):
        def say(self, line):
            raise KeyError("x")

        stop = say

    fit = Fit(lambda: Broken([]))
    fit.begin(0, 2)
    fit.say("one")
    fit.say("two")
    fit.end()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("unisono: standard output cannot be written")
    assert "'x'" in told
    assert told.endswith("training continues without progress output.")
