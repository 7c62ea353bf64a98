import io

from rich.console import Console

from unisono.train import progress
from unisono.train.progress import Bar, Lines, Silence, Summary, display


def test_a_terminal_gets_a_bar_that_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(progress, "_REDRAW_EVERY_S", 0.0)
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=60))
    bar.start(0, 10)
    bar.step(0, 0.5, 32)
    bar.say("epoch 1: validation loss 0.1")
    bar.stop()
    text = out.getvalue()
    assert "epoch 0" in text
    assert "loss 0.5000" in text
    assert "validation loss 0.1" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is shown again


def test_other_outputs_get_plain_lines():
    out = io.StringIO()
    lines = Lines(Console(file=out))
    lines.start(0, 10)
    lines.step(0, 0.5, 32)
    lines.say("a [line] that is longer than the width of any terminal " * 3)
    lines.stop()
    assert out.getvalue() == "a [line] that is longer than the width of any terminal " * 3 + "\n"


def test_only_rank_0_speaks():
    assert isinstance(display(1), Silence)
    assert isinstance(display(0), Lines)


def test_a_summary_names_what_it_did():
    summary = Summary(10, 320, 2.0, 4, 2, "ab" * 32, {"loss": 0.1}, None)
    assert str(summary) == (
        "10 steps, 320 samples in 2.0 s: 160 samples/s, 4 shards on 2 workers, "
        "digest abababababababab"
    )
