import io
import re

import pytest
from rich.console import Console

from unisono.train import progress
from unisono.train.progress import Bar, Lines, Silence, Summary, display


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
    monkeypatch.setattr(progress, "_REDRAW_EVERY_S", 0.0)
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
    assert "3/10 loss –" in first
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


def test_only_rank_0_speaks():
    assert isinstance(display(1), Silence)
    assert isinstance(display(0), Lines)


def test_a_bar_needs_a_terminal_that_can_redraw():
    assert isinstance(display(0, console(force_terminal=True)), Bar)
    assert isinstance(display(0, console()), Lines)
    dumb = console(force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(display(0, dumb), Lines)


def test_a_summary_names_what_it_did():
    summary = Summary(10, 320, 2.0, 4, 2, "ab" * 32, {"loss": 0.1}, None)
    assert str(summary) == (
        "10 steps, 320 samples in 2.0 s: 160 samples/s, 4 shards on 2 workers, "
        "digest abababababababab"
    )
