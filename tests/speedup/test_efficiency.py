"""What keeps workers from being N times as fast: the causes add up, and the largest is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from unisono.tools.plan.efficiency import (
    CAUSES,
    Measured,
    PlanAnswer,
    efficiencies,
    on_hosts,
    pays_from,
    timed_steps,
)
from unisono.training.events.step_sample import Seconds, without_pauses


def told(*own_s: float, exchange_s: float = 0.0, updating_s: float = 0.0) -> Seconds:
    """Make eight equal steps: what each worker takes for its shards, and what comes after."""
    slowest_s = max(own_s)
    row = [[0.0, 0.0, s / 2, s / 2, slowest_s - s, exchange_s, updating_s] for s in own_s]
    return np.array([row] * 8)


def measured(*turns: Seconds, shards: int = 4) -> Measured:
    steps = tuple(timed_steps([one, one]) for one in turns)
    return Measured("cpu", shards, 8 * shards, 320, 4_000_000, steps)


def test_two_workers_that_share_all_work_evenly_are_twice_as_fast() -> None:
    one, two = efficiencies(measured(told(0.04), told(0.02, 0.02)))
    assert (one.speed_up, one.efficiency, one.num_workers) == (1.0, 1.0, 1)
    assert two.speed_up == pytest.approx(2.0)
    assert two.samples_per_second == pytest.approx(32 / 0.02)
    assert two.epoch_s == pytest.approx(0.2)
    assert two.limit == ("Limit: none found; a step on 2 workers takes 20 ms, ideally 20 ms.")
    assert one.limit == "Limit: not known, as one worker alone was timed."


@pytest.mark.parametrize(
    ("cause", "several", "cost_s"),
    [
        ("contention", told(0.03, 0.03), 0.01),
        ("stragglers", told(0.015, 0.025), 0.005),
        ("exchange", told(0.02, 0.02, exchange_s=0.01), 0.01),
        ("update", told(0.02, 0.02, updating_s=0.008), 0.006),
        ("shards", told(0.02, 0.01, 0.01), 0.02 - 0.04 / 3),
    ],
)
def test_what_costs_most_is_named(cause: str, several: Seconds, cost_s: float) -> None:
    alone = told(0.04, updating_s=0.004 if cause == "update" else 0.0)
    row = efficiencies(measured(alone, several))[-1]
    assert row.causes_s[cause] == pytest.approx(cost_s)
    assert row.limit.startswith(f"Limit: {cause} ({CAUSES[cause]}), {cost_s * 1e3:,.3g} ms; ")
    ideal_s = alone.sum(axis=2).mean() / row.num_workers
    assert ideal_s + sum(row.causes_s.values()) == pytest.approx(row.step_s)


def test_turns_that_differ_are_told() -> None:
    quiet, busy = told(0.04), told(0.05)
    steps = (timed_steps([quiet, busy]),)
    (row,) = efficiencies(Measured("cpu", 4, 32, None, 0, steps))
    assert row.turns_differ == pytest.approx(0.25)
    assert row.step_s == pytest.approx(0.045)
    assert row.epoch_s is None


def test_nothing_limits_where_the_machine_is_busy() -> None:
    steps = (timed_steps([told(0.04)] * 2), timed_steps([told(0.02, 0.02), told(0.04, 0.04)]))
    row = efficiencies(Measured("cpu", 4, 32, None, 0, steps))[-1]
    assert row.limit.startswith("Limit: cannot be told, as the machine is busy: turns of the same")
    assert "2 workers differ by 100 %. End other programs and run it again." in row.limit


def test_a_cause_costs_no_more_than_the_gap() -> None:
    row = efficiencies(measured(told(0.04), told(0.015, 0.015, exchange_s=0.01)))[-1]
    assert row.causes_s["exchange"] == pytest.approx(0.01)  # and contention is negative
    assert "Limit: exchange" in row.limit
    assert ", 5 ms; a step on 2 workers takes 25 ms, ideally 20 ms." in row.limit


def test_the_batch_from_which_on_workers_gain_is_told() -> None:
    alone = told(0.002, updating_s=0.001)
    answer = PlanAnswer("train.py", measured(alone, told(0.001, 0.001, exchange_s=0.004)), 2, None)
    (line,) = [note for note in answer.as_json["notes"] if "slower" in note]
    assert "they gain from a batch of about 96," in line  # passes of 6 ms, halved: 3 of 6
    assert pays_from(answer.measured, answer.measured.steps[-1]) == 96
    gains = measured(told(0.04), told(0.02, 0.02, exchange_s=0.001))
    assert pays_from(gains, gains.steps[-1]) is None


def test_steps_after_a_pause_are_left_out() -> None:
    times = told(0.04)
    times[:, :, 0] = 1e-4
    times[3, 0, 0] = 2.0
    assert len(without_pauses(times)) == 7


def test_what_dividing_the_optimizer_state_would_save_is_told() -> None:
    two = replace(measured(told(0.04), told(0.02, 0.02)), state_bytes=800_000_000)
    notes = " ".join(PlanAnswer("train.py", two, 2, None).as_json["notes"])
    assert "saves each of 2 workers 385 MiB: it keeps 381 MiB of 763 MiB" in notes
    for state_bytes in (0, 40_000, 8_000_000):  # nothing worth a word
        less = PlanAnswer("train.py", replace(two, state_bytes=state_bytes), 2, None)
        assert "zero" not in " ".join(less.as_json["notes"])


def test_hosts_are_computed_by_the_formula() -> None:
    found = on_hosts(
        measured(told(0.04), told(0.02, 0.02, exchange_s=0.001, updating_s=0.002)), 2, 1.25e9
    )
    assert (found.workers_per_host, found.shards_of_worker, found.parts_of_host) == (2, 1, 1)
    assert found.passes_s == pytest.approx(0.01)
    assert found.update_s == pytest.approx(0.003)
    assert found.links_s == pytest.approx(4e6 / (1.25e9 * 1448 / 1538))
    assert found.step_s == pytest.approx(found.passes_s + found.update_s + found.links_s)
    assert found.speed_up == pytest.approx(0.04 / found.step_s)


def test_hosts_have_as_many_workers_as_there_are_shards_for() -> None:
    timed = measured(told(0.06), told(0.03, 0.03), shards=6)
    found = on_hosts(timed, 4, 1.25e9)
    assert (found.workers_per_host, found.shards_of_worker, found.parts_of_host) == (1, 2, 1)
    assert on_hosts(measured(told(0.06), shards=6), 2, 1.25e9).parts_of_host == 2
    with pytest.raises(ValueError, match=r"`--hosts` must be at most the program's `shards` \(6\)"):
        on_hosts(timed, 7, 1.25e9)
