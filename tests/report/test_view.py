"""Events, processes and the clock give what is to be seen."""

import json

import pytest
from tests.report.lines import event, history_of, status_of, step, workers
from tests.report.synthetic import BEGAN_UNIX_S, run_lines, start_line, to_bytes

from unisono.tools.report.page import state
from unisono.tools.report.run_progress import GONE, Process
from unisono.tools.report.view import Condition, RunStatus, see
from unisono.training.events.events import read_event

BUSY = Process("running", 300_000_000)
STOPPED = Process("stopped")
BOTH_BUSY = {0: BUSY, 1: BUSY}


def view(*lines, processes=BOTH_BUSY, at_s=1.0, **known):
    return see(status_of(*lines), processes, BEGAN_UNIX_S + at_s, **known)


def test_a_run_under_way_is_told():
    found = view(
        start_line(),
        step(198, 0.5),
        step(199, 1.0, seconds=0.5),
        event("evaluation", 100, 0.7, means={"loss": 0.25, "accuracy": 0.91}),
        event("checkpoint", 100, 0.8),
        at_s=4.0,
    )
    assert found.condition is Condition.RUNNING
    assert found.title == "my script.py --lr 0.1"
    assert found.facts == ("running, 4 s", "2 workers", "4 shards", "on example")
    assert (found.num_done, found.end_step) == (200, 300)
    assert found.position == ("epoch 2 of 3", "50 s to go")
    assert found.numbers == ("loss 0.2912", "128 samples/s", "learning rate 0.1")
    assert found.kept == (
        "validation at step 100: loss 0.25, accuracy 0.91",
        "checkpoint begun at step 100, 3 s ago",
    )
    assert (found.trouble, found.message, found.is_over) == ("", "", False)
    first, second = found.workers
    assert (first.rank, first.pid, first.state) == (0, 4000, "running")
    assert first.work_s == pytest.approx(0.008)  # of ten milliseconds two were waiting
    assert first.shares["backward"] == pytest.approx(0.4)
    assert not second.is_slow
    assert found.slowness == ""


def test_a_clock_that_is_set_leaves_the_speed_alone():
    found = view(start_line(), step(98, 0), step(99, 86_400, seconds=0.5), at_s=86_401)
    assert found.position == ("epoch 1 of 3", "1 min 40 s to go")


def test_standing_still_is_told_in_words():
    found = view(start_line(), step(0, 0.5), step(1, 1), at_s=13.2)
    assert found.condition is Condition.STILL
    assert found.message == "no step for 12 s: `unisono where` shows who waits for whom"
    assert not found.is_over


def test_a_run_that_repeats_steps_does_not_stand_still():
    steps = step(98, 0), step(99, 1, seconds=1.0)
    lines = [start_line(), *steps, event("went_back", 80, 1.5, from_step=100)]
    assert view(*lines, at_s=25).condition is Condition.RUNNING
    assert view(*lines, at_s=30).condition is Condition.STILL
    assert view(*lines, step(100, 22), at_s=120).condition is Condition.STILL


@pytest.mark.parametrize(
    ("lines", "until_s", "words"),
    [
        ([], 3, "no step yet for "),
        # Steps take as long.
        ([step(n, 60 * n, seconds=60.0) for n in range(3)], 420, "no step for "),
        ([step(98, 0), step(99, 1), event("evaluation", 100, 30.0, means={})], 33, "no step for "),
    ],
)
def test_a_run_stands_still_some_time_after_its_last_sign_of_life(lines, until_s, words):
    assert view(start_line(), *lines, at_s=until_s - 1).condition is Condition.RUNNING
    still = view(start_line(), *lines, at_s=until_s + 9)
    assert (still.condition, still.message.startswith(words)) == (Condition.STILL, True)


@pytest.mark.parametrize(
    ("processes", "at_s", "is_over"),
    [
        ({0: GONE, 1: GONE}, 5.1, True),  # nobody is there who could call `fit` again
        (BOTH_BUSY, 6.0, False),
        (BOTH_BUSY, 10.1, True),
        ({0: STOPPED, 1: GONE}, 6.0, False),
        ({}, 5.1, True),
    ],
)
@pytest.mark.parametrize("last", ["end", "failure"])
def test_a_fit_that_ended_may_be_followed_by_another(last, processes, at_s, is_over):
    end = event(last, 300, 5.0, error="E", message="m", rank=0)
    assert view(start_line(), end, processes=processes, at_s=at_s).is_over is is_over


def test_the_last_words_of_a_run_that_ended():
    lines = list(run_lines(num_steps=300))
    found = view(*lines, processes={0: GONE}, at_s=1000)
    assert found.facts[0] == "ended, 5 s"  # not a thousand seconds
    assert found.message.startswith("300 steps in ")
    assert found.message.endswith(" s, digest 0123456789abcdef")
    assert found.workers[0].state == "ended"
    assert "to go" not in " ".join(found.position)


def test_a_run_that_stopped_early_says_so():
    found = view(start_line(), event("end", 7, 2.0, stopped_early=True))
    assert found.facts[0] == "stopped early, 2 s"


@pytest.mark.parametrize(("by", "words"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_an_interrupted_run_says_so(by, words):
    lines = [start_line(), step(0, 0.5), event("interrupted", 1, 2.0, by=by)]
    found = view(*lines, at_s=1000)
    assert found.facts[0] == "interrupted, 2 s"
    assert found.message == f"interrupted by {words} after 1 step"
    assert found.is_over
    assert state(history_of(*lines).progress).word == "interrupted"


def test_the_last_words_of_a_run_that_failed():
    found = view(
        start_line(),
        event("failure", 12, 2.0, rank=1, error="ValueError", message="no\nmore"),
        processes={},
        at_s=3.0,
    )
    assert found.condition is Condition.FAILED
    assert found.message == "worker 1 failed at step 12: ValueError: no more"


@pytest.mark.parametrize(
    ("processes", "condition"),
    [
        ({0: GONE, 1: GONE}, Condition.GONE),
        ({0: GONE, 1: BUSY}, Condition.RUNNING),
        ({0: GONE}, Condition.RUNNING),  # of the other one nobody knows
    ],
)
def test_a_run_whose_launcher_is_gone_too_is_gone_at_once(processes, condition):
    lines = start_line(), step(0, 1.0)
    found = view(*lines, processes=processes, at_s=1.1, is_held=False)
    assert found.condition is condition
    assert not found.is_over  # the program may be started again
    assert view(*lines, processes=processes, at_s=1.1).condition is Condition.RUNNING


@pytest.mark.parametrize(
    ("processes", "at_s", "condition"),
    [
        ({0: GONE, 1: GONE}, 5.9, Condition.STILL),  # a replacement may come
        ({0: GONE, 1: GONE}, 6.1, Condition.GONE),
        ({0: GONE, 1: BUSY}, 60.0, Condition.STILL),
        ({0: GONE}, 60.0, Condition.STILL),
        ({}, 6000.0, Condition.STILL),  # on another host nobody knows
    ],
)
def test_a_run_without_a_last_word_is_gone_with_its_workers(processes, at_s, condition):
    found = view(start_line(), step(0, 1.0), processes=processes, at_s=at_s)
    assert found.condition is condition
    assert found.is_over is (condition is Condition.GONE)
    if found.is_over:
        assert found.message == (
            "no worker is there any more, so the run was interrupted or killed: "
            "last heard of 5 s ago"
        )


def test_losses_are_told():
    lost = [workers(n, n, ranks=[0], lost=[1], why=[f"worker 1 was killed, {n}"]) for n in (1, 2)]
    found = view(start_line(), lost[0], at_s=5)
    assert found.trouble == "worker 1 was killed, 1, 4 s ago"
    assert [(w.rank, w.state) for w in found.workers] == [(0, "running"), (1, "lost")]
    found = view(start_line(), *lost, at_s=5)
    assert found.trouble == "2 workers lost; the last: worker 1 was killed, 2, 3 s ago"


HOSTILE = "\x1b[31m[red]\r\n\x07\u202e\u200b]8;;http://x\x9b"


def hostile_lines():
    yield start_line(command=[HOSTILE, HOSTILE], host=HOSTILE)
    yield step(0, 0.5, means={HOSTILE: 1.0})
    yield workers(1, ranks=[0], lost=[1], why=[HOSTILE])
    yield event("evaluation", 1, means={HOSTILE: 1.0})


@pytest.mark.parametrize(
    "last",
    [
        event("failure", 1, rank=0, error=HOSTILE, message=HOSTILE * 1000),
        event("end", 1, digest=HOSTILE),
        event("checkpoint", 1),
    ],
)
def test_nothing_from_a_file_reaches_the_terminal_as_it_is(last):
    found = view(*hostile_lines(), last)
    texts = [found.title, found.trouble, found.message]
    texts += [*found.facts, *found.position, *found.numbers, *found.kept]
    assert all(text.isprintable() for text in texts)
    assert all(len(text) < 5_000 for text in texts)


def test_numbers_beyond_all_bounds_stay_short():
    big = 2**53
    lines = [
        start_line(end_step=big, steps_per_epoch=1, num_workers=2, ranks=[big, 0], pids=[big, big]),
        step(big - 1, 1, means={"loss": 1e308, "x": float("-1e-308")}, seconds=1e-300),
        event("checkpoint", big, -1e300),
        event("end", big, 1e300, samples_per_second=1e308, seconds=1e308),
    ]
    made = RunStatus()
    for line in lines:
        made.add(read_event(json.dumps(line).encode()))
    found = see(made, {}, BEGAN_UNIX_S)
    texts = [found.message, *found.facts, *found.position, *found.numbers, *found.kept]
    assert max(map(len, texts)) < 100


def test_events_in_any_order_break_nothing():
    lines = list(run_lines(num_steps=30, lost_at=10, fails=True))
    for first in range(0, len(lines), 5):
        made = RunStatus()
        for line in [*lines[first:], *lines[:first]]:
            made.add(read_event(to_bytes(line)))
            see(made, BOTH_BUSY, BEGAN_UNIX_S + 3)
