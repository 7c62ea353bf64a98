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

from unisono.report.drawing import draw
from unisono.report.process_status import GONE, Process, ProcessState
from unisono.report.slowdown import Slowdown, SlowdownCause
from unisono.report.status import WorkerLine
from unisono.report.table import cells
from unisono.report.view import see

SLOW_ROW = [0.001, 0.004, 0.008, 0.0, 0.0005, 0.0005]
ROW = [0.001, 0.002, 0.004, 0.006, 0.0005, 0.0005]
BUSY = Process(ProcessState.RUNNING, 0.98, 299 << 20, 310 << 20)
STOPPED = Process(ProcessState.STOPPED, 0.0, 290 << 20, 310 << 20)


def view(num_workers=2, *lines, processes=None, at_s=4.0):
    rows = [ROW] * (num_workers - 1) + [SLOW_ROW]
    ranks = range(num_workers)
    made = status_of(
        start_line(num_workers=num_workers, shards=num_workers, command=["train.py", "--lr=0.1"]),
        step(198, 0.5, ranks=ranks, rows=rows),
        event("checkpoint", 100, 0.6),
        step(199, 1.0, ranks=ranks, rows=rows),
        *lines,
    )
    sentence = f"worker {num_workers - 1} is slow in its passes: 10.4 ms a step, 4.7 ms more"
    made.findings = (
        Slowdown(SlowdownCause.WORKER, 0.28, sentence, "look at its core", num_workers - 1),
    )
    found = dict.fromkeys(ranks, BUSY) if processes is None else processes
    return see(made, found, BEGAN_UNIX_S + at_s)


def drawn(what, width, height=None, **options):
    """The lines of a terminal of that width, without blanks at their ends."""
    console = Console(width=max(width, 1), file=io.StringIO(), color_system=None)
    console.print(draw(what, width, height, **options))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_eighty_columns():
    assert drawn(view(), 80, 24) == [
        "train.py --lr=0.1 · running, 4 s · 2 workers · 2 shards · on example",
        f"step 200 of 300 · epoch 2 of 3 · 50 s to go  {'━' * 20}{'─' * 10} 66 %",
        "loss 0.2912 · 128 samples/s · learning rate 0.1",
        "checkpoint begun at step 100, 3 s ago",
        "rank  pid state   step mostly        its time      ms/step   memory   CPU",
        "   0 4000 running  200 waiting   43% lffbbbwwwwws       8   299 MiB   98%",
        "   1 4001 running  200 backward  57% lfffbbbbbbbs      14!  299 MiB   98%",
        "! worker 1 is slow in its passes, which costs 28 % of the time",
        "loading  forward  backward  waiting  summing  updating  of the last 2 steps",
    ]


def test_forty_columns_of_ten_lines():
    still = view(processes={0: STOPPED, 1: BUSY}, at_s=13.0)
    assert drawn(still, 40, 10) == [
        "train.py --lr=0.1 · standing still, 13 s",
        "2 workers · 2 shards · on example",
        "step 200 of 300 · epoch 2 of 3",
        "loss 0.2912 · 128 samples/s",
        "checkpoint begun at step 100, 12 s ago",
        "no step for 12 s: worker 0 stopped;",
        "worker 1 computing",
        "rank step mostly    ms/step   memory",
        "   0  200 stopped        8   290 MiB",
        "   1  200 backward      14!  299 MiB",
    ]


def test_what_is_wide_has_more_columns():
    lines = [drawn(view(), width) for width in (120, 68, 60)]
    heads = [next(line for line in some if line.startswith("rank")).split() for some in lines]
    assert set(heads[0]) > set(heads[1]) > set(heads[2])
    assert {"rank", "step", "mostly", "ms/step", "memory"} <= set(heads[2])


def test_the_progress_bar_takes_what_room_there_is():
    for width in range(62, 120):
        line = next(line for line in drawn(view(), width) if line.startswith("step"))
        assert len(line) <= width
        full, empty = line.count("━"), line.count("─")
        assert 10 <= full + empty <= 40
        assert full == (full + empty) * 200 // 300


def test_without_unicode_the_bar_is_of_ascii():
    line = drawn(view(), 80, has_unicode=False)[1]
    assert "==--" in line
    assert "━" not in line


def test_whoever_is_in_trouble_is_shown_among_many():
    processes = dict.fromkeys(range(40), BUSY) | {20: STOPPED, 30: GONE}
    lines = drawn(view(40, processes=processes), 80, 12)
    ranks = [line.split()[0] for line in lines[-7:-1]]
    assert {"20", "30", "39"} <= set(ranks)  # 39 is slow
    assert ranks == sorted(ranks, key=int)
    assert lines[-1] == "and 34 more workers"


def test_all_workers_are_shown_where_nothing_is_cut():
    lines = drawn(view(40), 80)
    assert [line.split()[0] for line in lines[-42:-2]] == [str(rank) for rank in range(40)]


def test_in_few_lines_last_words_come_before_numbers():
    words = "the loss of step 200 is nan: lower the learning rate"
    lost = workers(200, ranks=[0], lost=[1], why=["worker 1 was killed by SIGKILL"])
    failed = event("failure", 200, rank=0, error="NonFiniteLossError", message=words)
    lines = drawn(view(2, lost, failed), 40, 10)
    at = lines.index("worker 0 failed at step 200:")
    assert " ".join(lines[at + 1 : at + 3]) == f"NonFiniteLossError: {words}"
    assert lines[0].startswith("train.py --lr=0.1 · failed")
    assert lines[1].startswith("step 200 of 300")


@pytest.mark.parametrize("width", [40, 80])
def test_a_lost_worker_is_called_so_at_any_width(width):
    lost = view(2, workers(200, ranks=[0], lost=[1]))
    assert "lost" in next(line for line in drawn(lost, width) if line.startswith("   1 "))


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (120, ": 10.4 ms a step, 4.7 ms more, which costs 28 % of the time"),
        (80, ", which costs 28 % of the time"),
        (40, ""),
    ],
)
def test_who_is_slow_is_told_in_what_room_there_is(width, words):
    assert f"! worker 1 is slow in its passes{words}" in drawn(view(), width)


def test_last_words_are_not_cut_at_the_end():
    long = view(2, event("failure", 200, rank=0, error="E", message="word " * 100))
    assert " ".join(drawn(long, 40)).count("word") == 100
    cut = drawn(long, 40, 24)
    assert sum("word" in line for line in cut) == 3
    assert cut[-4].endswith("…") or cut[-5].endswith("…")


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
    assert len(lines) <= max(height, 1)
    assert max(map(cell_len, lines)) <= max(width, 1)


def test_names_are_no_markup():
    lost = workers(200, ranks=[0], lost=[1], why=["[red]why[/red] :smile:"])
    assert any("[red]why[/red] :smile:" in line for line in drawn(view(2, lost), 80))


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ([1.0, 0, 0, 0, 0, 0], [12, 0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0, 1.0], [0, 0, 0, 0, 0, 12]),
        ([1 / 6] * 6, [2, 2, 2, 2, 2, 2]),
        ([0.04, 0.32, 0.32, 0.32, 0, 0], [0, 4, 4, 4, 0, 0]),
    ],
)
def test_a_bar_is_divided_without_a_rest(shares, found):
    assert cells(shares, 12) == found


@given(st.lists(st.floats(0, 1e6), min_size=6, max_size=6).filter(any))
def test_a_bar_is_always_full(seconds):
    found = cells([one / sum(seconds) for one in seconds], 12)
    assert sum(found) == 12
    assert min(found) >= 0


def test_a_worker_of_whom_nothing_is_known_has_its_line():
    what = replace(
        view(),
        workers=(WorkerLine(7, None, Process(ProcessState.UNKNOWN)),),
        num_steps=0,
        slowness=(),
    )
    assert drawn(what, 80)[-1].split() == ["7", "–", "unknown", *["–"] * 5]
