import pytest

from unisono.tools.verify.bit_checks import check_exact
from unisono.tools.verify.findings import in_order


def run(world_size, changes=()):
    """Make a run of two steps and two shards; `changes` replace some digests."""
    made = {}
    for step in range(2):
        for shard in range(2):
            made[step, "samples", shard] = {"the batch": f"samples {step} {shard}"}
            made[step, "gradients", shard] = {"w": f"gradient {step} {shard}"}
        for rank in range(world_size):
            made[step, "parameters", rank] = {"w": f"w {step}"}
            made[step, "buffers", rank] = {"mean": f"mean {step}"}
    return made | dict(changes)


def first(runs):
    found = in_order(check_exact(runs))[0]
    return found.check, found.verdict, found.evidence


def test_equal_runs_are_equal_in_all_checks():
    found = check_exact({size: run(size) for size in (1, 2, 3)})
    assert {finding.verdict for finding in found} == {"ok"}
    assert "2 shards" in found[0].evidence
    assert "1, 2, 3 workers in 2 steps" in found[0].evidence


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({(1, "samples", 0): {"the batch": "x"}}, "samples-lost", "Step 1, shard 0"),
        ({(0, "gradients", 1): {"w": "x"}}, "gradients-not-averaged", "gradient of `w` on 2"),
        ({(0, "gradients", 1): {}}, "gradients-not-averaged", "gradient of `w` on 2"),
        (
            {(1, "parameters", 1): {"w": "x"}},
            "parameters-differ",
            "worker 1 of 2 has other parameters",
        ),
        ({(0, "buffers", n): {"mean": "x"} for n in (0, 1)}, "buffers-differ", "first is `mean`"),
        # Of two differences the earlier one is the cause.
        (
            {(1, "samples", 1): {"the batch": "x"}, (0, "gradients", 0): {"w": "x"}},
            "gradients-not-averaged",
            "Step 0, shard 0",
        ),
    ],
)
def test_the_first_difference_is_named(changes, check, words):
    found, verdict, evidence = first({1: run(1), 2: run(2, changes)})
    assert (found, verdict) == (check, "wrong")
    assert words in evidence


def test_runs_without_a_common_step_say_nothing():
    assert first({1: run(1), 2: {}})[1] == "unknown"
