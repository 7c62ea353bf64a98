import errno
import io
import os
import re
import sys

import pytest
from rich.console import Console

from unisono.callbacks import display as display_module
from unisono.callbacks.display import Bar, Lines, Relay, Silence, display
from unisono.callbacks.summary import Summary


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


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(display_module, "_REDRAW_EVERY_S", 0.0)
    terminal = console(force_terminal=True)
    bar = Bar(terminal)
    bar.start(0, 10)
    bar.step(0, 0.5, 32)
    bar.say("epoch 1: validation loss 0.1")
    bar.stop()
    text = terminal.file.getvalue()
    assert "epoch 1 " in text  # as in the line of its validation
    assert "loss 0.5000" in text
    assert "validation loss 0.1" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, ["epoch", "━", "812/2814", "loss 0.1234", "3,200 samples/s", ":"]),
        (80, ["epoch", "━", "812/2814", "loss 0.1234", "3,200 samples/s", ":"]),
        (79, ["epoch", "━", "812/2814", "loss 0.1234", ":"]),
        (60, ["epoch", "━", "812/2814", "loss 0.1234", ":"]),
        (59, ["━", "812/2814", "loss 0.1234"]),
        (31, ["━", "812/2814", "loss 0.1234"]),
        (29, ["812/2814", "loss 0.1234"]),
        (22, ["812/2814", "loss 0.1234"]),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns_and_all_of_each(width, shown):
    terminal, clock = console(width, force_terminal=True), Clock()
    bar = Bar(terminal, clock)
    bar.start(811, 2814)
    clock.now += 0.25
    bar.step(1, 0.1234, 800)
    bar.stop()
    frame = frames(terminal)[-1]
    everything = ["epoch", "━", "812/2814", "loss 0.1234", "3,200 samples/s", ":"]
    assert [one for one in everything if one in frame] == shown
    assert "…" not in frame


def test_before_the_first_step_nothing_is_claimed():
    terminal = console(force_terminal=True)
    bar = Bar(terminal)
    bar.start(3, 10)
    first = frames(terminal)[0]
    bar.stop()
    assert "3/10 loss -" in first
    assert "nan" not in first
    assert "epoch" not in first
    assert "samples/s" not in first


def test_other_outputs_get_plain_lines():
    out = io.StringIO()
    lines = Lines(Console(file=out))
    lines.start(0, 10)
    lines.step(0, 0.5, 32)
    lines.say("a [line] that is longer than the width of any terminal " * 3)
    lines.stop()
    assert out.getvalue() == "a [line] that is longer than the width of any terminal " * 3 + "\n"


def test_a_long_run_says_every_half_minute_how_far_it_is():
    log, clock = console(), Clock()
    lines = Lines(log, clock)
    lines.start(2000, 2814)
    for step in range(100):  # of one second
        clock.now += 1
        lines.step(1, 1 / (step + 1), 3455)
    lines.stop()
    assert log.file.getvalue().splitlines() == [
        "epoch 2, step 2,030 of 2,814: loss 0.0333, 3,455 samples/s",
        "epoch 2, step 2,060 of 2,814: loss 0.0167, 3,455 samples/s",
        "epoch 2, step 2,090 of 2,814: loss 0.0111, 3,455 samples/s",
    ]


class Screen(Silence):
    """What one worker has shown."""

    def __init__(self, seen):
        self._seen = seen

    def start(self, done, total):
        self._seen.append(f"start {done}/{total}")

    def step(self, epoch, loss, num_samples):
        self._seen.append("step")

    def say(self, line):
        self._seen.append(line)

    def stop(self):
        self._seen.append("stop")


class Team:
    """Workers that all do the same; one of them leads."""

    def __init__(self, num_workers):
        self.leader = 0
        self.seen = [[] for _ in range(num_workers)]
        self.relays = [self.relay(rank) for rank in range(num_workers)]

    def relay(self, rank):
        return Relay(lambda: rank == self.leader, lambda: Screen(self.seen[rank]))

    def all(self, act):
        for relay in self.relays:
            act(relay)


def test_only_the_lead_speaks():
    team = Team(3)
    team.all(lambda relay: relay.start(0, 10))
    team.all(lambda relay: relay.step(0, 0.5, 32))
    team.all(lambda relay: relay.say("epoch 1"))
    team.all(Relay.stop)
    assert team.seen == [["start 0/10", "step", "epoch 1", "stop"], [], []]


def test_who_takes_the_lead_goes_on_where_the_other_was():
    team = Team(2)
    team.all(lambda relay: relay.start(2, 10))
    for _ in range(3):
        team.all(lambda relay: relay.step(0, 0.5, 32))
    team.leader = 1
    team.all(lambda relay: relay.step(0, 0.5, 32))
    team.all(Relay.stop)
    assert team.seen[0] == ["start 2/10", "step", "step", "step", "stop"]
    assert team.seen[1] == ["start 5/10", "step", "stop"]


def test_a_replacement_that_leads_begins_where_the_run_is():
    team = Team(1)
    team.relays[0].start(0, 10)
    team.relays[0].step(0, 0.5, 32)
    team.leader = 1
    replacement = team.relay(0)
    replacement.start(0, 10)
    replacement.at(7)
    team.leader = 0
    replacement.step(0, 0.5, 32)
    replacement.stop()
    assert team.seen[0] == ["start 0/10", "step", "start 7/10", "step", "stop"]


def test_a_replacement_that_took_itself_for_the_lead_begins_anew_where_the_run_is():
    team = Team(1)
    team.relays[0].start(0, 10)
    for done in (7, 8):
        team.relays[0].at(done)
        team.relays[0].step(0, 0.5, 32)
    assert team.seen[0] == ["start 0/10", "stop", "start 7/10", "step", "step"]


def test_who_loses_the_lead_and_gets_it_again_begins_anew():
    team = Team(2)
    team.all(lambda relay: relay.start(0, 10))
    team.leader = 1
    team.all(lambda relay: relay.step(0, 0.5, 32))
    team.leader = 0
    team.all(lambda relay: relay.step(0, 0.5, 32))
    assert team.seen[0] == ["start 0/10", "stop", "start 1/10", "step"]
    assert team.seen[1] == ["start 0/10", "step", "stop"]


def test_one_that_never_led_has_no_display_to_stop():
    made = []
    relay = Relay(lambda: False, lambda: made.append("display"))
    relay.start(0, 1)
    relay.step(0, 0.5, 1)
    relay.say("unheard")
    relay.stop()
    assert made == []


class Broken(io.StringIO):
    """Takes nothing."""

    def __init__(self, code):
        super().__init__()
        self._code = code

    def write(self, text):
        raise OSError(self._code, os.strerror(self._code))

    def isatty(self):
        return self._code == errno.EIO


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EIO], ids=os.strerror)
def test_a_run_that_cannot_be_shown_goes_on_and_is_told_of_once(code, monkeypatch, capsys):
    monkeypatch.setattr(display_module, "_REDRAW_EVERY_S", 0.0)
    monkeypatch.setattr(sys, "stdout", Broken(code))
    monkeypatch.setenv("TERM", "xterm")
    relay = Relay(lambda: True, display)
    relay.start(0, 3)
    for _ in range(3):
        relay.step(0, 0.5, 32)
        relay.say("a line")
    relay.stop()
    relay.start(3, 4)
    relay.say("another line")
    relay.stop()
    assert capsys.readouterr().err == (
        f"unisono: the run is not shown any more, since standard output takes nothing "
        f"({os.strerror(code)}); it goes on.\n"
    )


@pytest.mark.parametrize("make", [Lines, Bar])
@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "5.9 × ? 2"), ("ascii", "5.9 ? ? 2")])
def test_letters_that_an_output_lacks_end_no_run(make, encoding, shown):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    shower = make(Console(file=out, force_terminal=make is Bar, _environ={"TERM": "xterm"}))
    shower.start(0, 3)
    shower.step(0, 0.5, 32)
    shower.say("5.9 × → 2")
    shower.stop()
    assert shown in raw.getvalue().decode(encoding)


def test_what_is_said_outside_of_a_run_is_a_line_and_no_more():
    team = Team(1)
    (relay,) = team.relays
    relay.say("going on from a checkpoint")
    relay.stop()
    assert team.seen == [["going on from a checkpoint"]]
    relay.start(0, 1)
    relay.stop()
    relay.say("over")
    relay.stop()
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


@pytest.mark.parametrize("error", [ValueError("I/O operation on closed file"), KeyError("x")])
def test_a_display_that_fails_in_any_way_is_told_once_and_shows_nothing_more(error, capsys):
    class Broken(Silence):
        def say(self, line):
            raise error

        def stop(self):
            raise error

    relay = Relay(lambda: True, Broken)
    relay.start(0, 2)
    relay.say("one")
    relay.say("two")
    relay.stop()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("unisono: the run is not shown any more")
    assert str(error) in told
    assert told.endswith("it goes on.")
