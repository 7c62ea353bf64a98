"""One pass over a file: what is counted, what is marked, what is left out."""

import pytest
from tests.report.lines import history_of
from tests.report.synthetic import step_line, write_run

from unisono.tools.report.history import gather
from unisono.training.events.events import End


def step(number, **change):
    return step_line(number, ranks=[0], phases=[[0.001] * 6], **{"seconds": 0.01, **change})


def test_a_run_is_gathered(tmp_path):
    history = gather(write_run(tmp_path))
    assert (history.progress.num_steps, history.progress.num_done) == (300, 300)
    assert isinstance(history.progress.ended, End)
    assert len(history.marks) == 2
    assert history.marks[0].text == "worker 1 was killed by SIGKILL"
    assert history.validation["loss"].values[-1].last_step == 300
    assert sorted(history.phases.by_rank) == [0, 1, 2, 3]
    assert history.phases.by_rank[1].num_steps == 288
    assert history.progress.ranks == (0, 1, 2, 3)
    assert history.progress.num_checkpoints == 3


def test_speed_is_samples_over_seconds_not_a_mean_of_speeds():
    history = history_of(step(0, num_samples=64), step(1, num_samples=0, seconds=0.03))
    history.samples_per_second._halve()
    assert history.samples_per_second.values[0].mean == pytest.approx(64 / 0.04)


def test_the_best_value_is_the_least_loss_or_the_greatest_else():
    history = history_of(
        *(
            {"event": "evaluation", "step": i, "means": {"loss": value, "x": value}}
            for i, value in enumerate([3, 1, "nan", 4, "inf"])
        )
    )
    assert history.best == {"loss": (1, 1.0), "x": (3, 4.0)}


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "tells nothing:"), (b"x\ny\n", r"\(2 lines cannot be read\)")]
)
def test_a_file_that_tells_nothing_is_refused(tmp_path, content, told):
    (tmp_path / "events.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        gather(tmp_path)
