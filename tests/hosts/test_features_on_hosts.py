"""What runs do on one host, they do on several: features, and states from batch to batch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.hosts.conftest import MakeHosts
from tests.hosts.test_hosts import TRAIN, Output, srun, start, unisono_run
from tests.test_examples import results

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

CARRY = "tests/hosts/programs/carry.py"
# The programs of a feature, but those that plant a fault, are started by another launcher or have
# another test here.
EXAMPLES = ("averaged_weights", "callbacks", "contrastive", "gan", "mixed_precision", "streams")


def has_trained(outputs: Sequence[Output]) -> str:
    return "".join(output.has_ended_well() for output in outputs)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_digest_of_one_host(make_hosts: MakeHosts, name: str) -> None:
    script, hosts = f"examples/by_feature/{name}.py", make_hosts(2)
    said = []
    for workers in ([2], [1, 1]):
        outputs = start(hosts[: len(workers)], workers, [script])
        has_trained(outputs)
        said.append(results(outputs[0].text))
    assert said[0]
    assert said[1] == said[0]


OTHER_PROCESSOR = """
import os, socket, sys
from runpy import run_path
if socket.gethostname() == "host1":
    os.environ["MKL_CBWR"] = "COMPATIBLE"  # as one without AVX
sys.argv.append("cnn")
"""


def test_processors_that_round_differently_are_refused(make_hosts: MakeHosts) -> None:
    for output in srun(make_hosts(2), [1, 1], "-c", f"{OTHER_PROCESSOR}run_path('{TRAIN}')"):
        assert "the processors of all hosts must compute the same bits, but" in output.end()


@pytest.mark.parametrize("model", ["recurrent", "memory"])
def test_states_go_from_batch_to_batch_on_any_hosts(
    make_hosts: MakeHosts, tmp_path: Path, model: str
) -> None:
    hosts, said = make_hosts(2), set()
    kept = ("--directory", str(tmp_path / "a run"))
    for workers, options in (([4], ()), ([2, 2], ()), ([1, 3], ()), ([1, 2], kept)):
        outputs = start(hosts[: len(workers)], workers, [CARRY, model, *options])
        has_trained(outputs)
        said |= told_by_ranks(outputs, sum(workers))
    assert len(said) == 1


@pytest.mark.parametrize("workers", [[2, 2], [1, 1]], ids=str)
def test_a_replaced_worker_has_the_states_of_all_hosts(
    make_hosts: MakeHosts, tmp_path: Path, workers
) -> None:
    hosts = make_hosts(2)
    kept = ("--directory", str(tmp_path / "a run"))
    kills = [f"kill:rank={sum(workers) - 1},step=3,at=updated", "kill:rank=0,step=10,at=shard"]
    outputs = unisono_run(hosts, workers, [CARRY, "recurrent", *kept], faults=kills)
    assert len(re.findall(r"rank \d is replaced", has_trained(outputs))) == 2
    alone = start(hosts[:1], [1], [CARRY, "recurrent"])
    has_trained(alone)
    assert told_by_ranks(outputs, sum(workers)) == told_by_ranks(alone, 1)


def told_by_ranks(outputs: Sequence[Output], num_ranks: int) -> set[str]:
    # torchrun's `python -u` writes a line and its end apart, so two ranks may share a line.
    told = "".join(output.text for output in outputs)
    found = re.findall(r"rank \d digest (\w{64} loss \d+\.\d+)", told)
    assert len(found) == num_ranks
    return set(found)
