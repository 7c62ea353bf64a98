import pytest

from unisono.verify.exact_checks import ExactRun, check_exact
from unisono.verify.findings import in_order


def run(world_size, **changes):
    """Make a run of two steps and two shards; `changes` replace one digest."""
    made = ExactRun(world_size)
    for step in range(2):
        for shard in range(2):
            made.samples[step, shard] = f"samples {step} {shard}"
            made.gradients[step, shard] = {"w": f"gradient {step} {shard}"}
        made.parameters[step] = [{"w": f"w {step}"} for _ in range(world_size)]
        made.buffers[step] = [{"mean": f"mean {step}"} for _ in range(world_size)]
    for name, value in changes.items():
        getattr(made, name).update(value)
    return made


def first(*runs):
    found = in_order(check_exact(runs))[0]
    return found.check, found.verdict, found.evidence


def test_equal_runs_are_equal_in_all_checks():
    found = check_exact([run(1), run(2), run(3)])
    assert {finding.verdict for finding in found} == {"ok"}
    assert "1, 2, 3 workers in 2 steps" in found[0].evidence


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"samples": {(1, 0): "x"}}, "samples-lost", "Step 1, shard 0"),
        ({"gradients": {(0, 1): {"w": "x"}}}, "gradients-not-averaged", "gradient of `w`"),
        ({"gradients": {(0, 1): {}}}, "gradients-not-averaged", "gradient of `w`"),
        (
            {"parameters": {1: [{"w": "w 1"}, {"w": "x"}]}},
            "parameters-differ",
            "worker 1 of 2 has other parameters",
        ),
        ({"buffers": {0: [{"mean": "x"}] * 2}}, "buffers-differ", "the first is `mean`"),
        # Of two differences the earlier one is the cause.
        (
            {"samples": {(1, 1): "x"}, "gradients": {(0, 0): {"w": "x"}}},
            "gradients-not-averaged",
            "Step 0, shard 0",
        ),
    ],
)
def test_the_first_difference_is_named(changes, check, words):
    found, verdict, evidence = first(run(1), run(2, **changes))
    assert (found, verdict) == (check, "wrong")
    assert words in evidence


def test_runs_without_a_common_step_say_nothing():
    assert first(run(1), ExactRun(2))[1] == "unknown"
