"""What is to be seen finds a place on every terminal."""

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from tests.report.lines import event, status_of, step, workers
from tests.report.synthetic import BEGAN_UNIX_S, run_lines, start_line

from unisono.tools.report.run_progress import GONE, Process
from unisono.tools.report.top import draw
from unisono.tools.report.view import WorkerLine, see
from unisono.training.events.events import Slowdown, SlowdownCause

SLOW_ROW = [0.001, 0.004, 0.008, 0.0, 0.0005, 0.0005]
ROW = [0.001, 0.002, 0.004, 0.006, 0.0005, 0.0005]
BUSY = Process("running", 299 << 20)
STOPPED = Process("stopped", 290 << 20)


def view(num_workers=2, *lines, processes=None, at_s=4.0):
    rows = [ROW] * (num_workers - 1) + [SLOW_ROW]
    ranks = range(num_workers)
    made = status_of(
        start_line(num_workers=num_workers, shards=num_workers, command=["train.py", "--lr=0.1"]),
        step(198, 0.5, ranks=ranks, rows=rows),
        event("checkpoint", 100, 0.6),
        step(199, 1.0, ranks=ranks, rows=rows, seconds=0.5),
        *lines,
    )
    sentence = f"worker {num_workers - 1} is slow in its passes: 10.4 ms a step, 4.7 ms more"
    made.findings = (
        Slowdown(SlowdownCause.WORKER, 0.28, sentence, "look at its core", num_workers - 1),
    )
    found = dict.fromkeys(ranks, BUSY) if processes is None else processes
    return see(made, found, BEGAN_UNIX_S + at_s)


def drawn(what, width, height=None):
    """The lines of a terminal of that width, without blanks at their ends."""
    console = Console(width=max(width, 1), file=io.StringIO(), color_system=None)
    console.print(draw(what, console, height))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_eighty_columns():
    assert drawn(view(), 80, 24) == [
        "train.py --lr=0.1 · running, 4 s · 2 workers · 2 shards · on example",
        f"step 200 of 300 · epoch 2 of 3 · 50 s to go  {'━' * 19}            66 %",
        "loss 0.2912 · 128 samples/s · learning rate 0.1",
        "checkpoint begun at step 100, 3 s ago",
        "! worker 1 is slow in its passes: 10.4 ms a step, 4.7 ms more, which costs 28 %…",
        "rank  pid state   load  fwd  bwd wait  sum  upd  ms/step   memory",
        "   0 4000 running   7%  14%  29%  43%   4%   4%        8  299 MiB",
        "   1 4001 running   7%  29%  57%   0%   4%   4%      14!  299 MiB",
    ]


def test_forty_columns():
    still = view(processes={0: STOPPED, 1: BUSY}, at_s=13.0)
    assert drawn(still, 40, 10) == [
        "train.py --lr=0.1 · standing still, 13 …",
        "step 200 of 300 · epoch 2 of 3",
        "loss 0.2912 · 128 samples/s · learning …",
        "checkpoint begun at step 100, 12 s ago",
        "no step for 12 s: `unisono where` shows…",
        "! worker 1 is slow in its passes: 10.4 …",
        "rank state    ms/step   memory",
        "   0 stopped        8  290 MiB",
        "   1 running      14!  299 MiB",
    ]


def test_on_devices_their_memory_has_a_column():
    told = {"allocated_bytes": [1 << 30] * 2}
    what = view(2, {**step(200, 1.5), **told})
    wide, narrow = (next(line for line in drawn(what, w) if line[:4] == "   0") for w in (120, 50))
    assert wide.split()[-4:] == narrow.split()[-4:] == ["1", "GiB", "299", "MiB"]


def test_whoever_is_in_trouble_is_shown_among_many():
    processes = dict.fromkeys(range(40), BUSY) | {20: STOPPED, 30: GONE}
    lines = drawn(view(40, processes=processes), 80, 12)
    ranks = [line.split()[0] for line in lines[-6:-1]]
    assert {"20", "30", "39"} <= set(ranks)  # 39 is slow
    assert ranks == sorted(ranks, key=int)
    assert (len(lines), lines[-1]) == (12, "and 35 more workers")


def test_all_is_shown_where_nothing_is_cut():
    lines = drawn(view(40, event("failure", 200, rank=0, error="E", message="word " * 100)), 40)
    assert [line.split()[0] for line in lines[-40:]] == [str(rank) for rank in range(40)]
    assert " ".join(lines).count("word") == 100


@pytest.mark.parametrize("width", [40, 80])
def test_a_lost_worker_is_called_so_at_any_width(width):
    lost = view(2, workers(200, ranks=[0], lost=[1]))
    assert "lost" in next(line for line in drawn(lost, width) if line.startswith("   1 "))


LINES = list(run_lines(num_steps=40, lost_at=20, fails=True))


@pytest.mark.slow
@given(
    num_lines=st.integers(0, len(LINES)),
    width=st.integers(0, 130),
    height=st.integers(0, 30),
    at_s=st.floats(0, 100),
    state=st.sampled_from([BUSY, STOPPED, GONE]),
)
def test_nothing_is_wider_or_higher_than_the_terminal(num_lines, width, height, at_s, state):
    made = status_of(*LINES[:num_lines])
    what = see(made, dict.fromkeys(range(3), state), BEGAN_UNIX_S + at_s)
    what = replace(what, title="一" * 40)  # two cells each
    lines = drawn(what, width, height)
    assert len(lines) <= max(height, 9)  # of a lower one, rich shows the upper part
    assert max(map(cell_len, lines)) <= max(width, 1)


def test_names_are_no_markup():
    lost = workers(200, ranks=[0], lost=[1], why=["[red]why[/red] :smile:"])
    assert any("[red]why[/red] :smile:" in line for line in drawn(view(2, lost), 80))


def test_a_worker_of_whom_nothing_is_known_has_its_line():
    what = replace(
        view(),
        workers=(WorkerLine(7, None, "unknown"),),
        slowness="",
    )
    assert drawn(what, 80)[-1].split() == ["7", "–", "unknown", *["–"] * 8]
