"""Runs whose loops take turns step by step are exact, or refused at their first step."""

import pytest
from tests.train import gan

import unisono


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loops_that_take_turns_are_exact_without_recovery(workers):
    alone = gan.step_by_step()
    assert alone[1:] == (gan.STEPS, gan.STEPS)
    assert unisono.launch(gan.step_by_step, workers=workers, restarts=0) == [alone] * workers


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_loops_that_take_turns_are_refused_at_their_first_step_where_workers_recover(workers):
    with pytest.raises(RuntimeError, match=r"take turns step by step: start .*`restarts=0`"):
        unisono.launch(gan.step_by_step, workers=workers)


@pytest.mark.parametrize("with_directory", [0, 1])
def test_loops_that_take_turns_are_refused_where_a_run_has_a_directory(tmp_path, with_directory):
    runs, data = gan.made()
    runs[with_directory] = gan.made(tmp_path)[0][with_directory]
    first, second = (run.steps(data, batch_size=16, steps=3) for run in runs)
    for run, loop in zip(runs, (first, second), strict=True):
        with next(loop) as step:
            for (real,) in step.shards:
                step.backward(run.model(real[:, : run.model[0].in_features]).square().mean())
    with pytest.raises(RuntimeError, match="leave `directory` out of both runs"):
        next(first)
    second.close()
    assert [run.position.step for run in runs] == [1, 1]


@pytest.mark.slow
def test_a_loop_that_ends_within_each_step_of_another_may_have_a_directory(tmp_path):
    assert gan.one_after_the_other(tmp_path) == 6
