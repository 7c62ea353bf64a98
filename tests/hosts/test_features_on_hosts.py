"""What runs do on one host, they do on several: features, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.exchanges import variables_of
from tests.hosts.conftest import MakeHosts
from tests.hosts.test_hosts import TRAIN, Output, all_well, start
from tests.hosts.virtual_hosts import torchrun
from tests.programs.together import CHANGED
from tests.programs.together import results as results_of
from tests.test_examples import results, written

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

RECIPES = ("byol", "contrastive", "dqn", "gan", "language_model", "regression")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_digest_of_one_host(
    make_hosts: MakeHosts, name: str, tmp_path: Path
) -> None:
    script, hosts = str(written(name, tmp_path)), make_hosts(2)
    said = []
    for workers in ([2], [1, 1]):
        outputs = start(hosts[: len(workers)], workers, [script])
        all_well(outputs)
        said.append(results(outputs[0].text))
    assert said[0]
    assert said[1] == said[0]


@pytest.mark.parametrize(("workers", "exchange"), [([2, 1], "shared"), ([1, 1], "staged")])
def test_what_a_program_changes_is_changed_once(
    make_hosts: MakeHosts, workers: list[int], exchange: str
) -> None:
    (alone,) = results_of(CHANGED, "shared", 1)
    found = zip(CHANGED, alone, strict=True)
    expected = [f"{program}: digest {one['digests']}" for program, one in found]
    program = "tests/hosts/programs/changed.py"
    begun = torchrun(make_hosts(2), workers, [program], environ=variables_of(exchange))
    for output, count in zip(map(Output, begun), workers, strict=True):
        said = [line for line in output.has_ended_well().splitlines() if ": digest " in line]
        assert sorted(said) == sorted(expected * count)


LONG = """
import torch, unisono

class Long(torch.utils.data.Dataset):
    def __len__(self): return 5_000_000
    def __getitem__(self, at): return torch.full((4,), at / len(self)), at % 3

torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=4).fit(
    Long(), batch_size=16, steps=6
)
"""


def test_the_order_of_a_long_epoch_is_that_of_one_host(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    script, hosts = tmp_path / "long.py", make_hosts(2)
    script.write_text(LONG)
    digests = set()
    for workers in ([1], [2, 2]):
        outputs = start(hosts[: len(workers)], workers, [str(script)])
        all_well(outputs)
        digests.add(outputs[0].text.split("digest ")[1].split()[0])
    assert len(digests) == 1


OTHER_PROCESSOR = """
import os, socket, sys
from runpy import run_path
if socket.gethostname() == "host1":
    os.environ["MKL_CBWR"] = "COMPATIBLE"  # as one without AVX
sys.argv.append("cnn")
"""


def test_processors_that_round_differently_are_refused(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    script = tmp_path / "other.py"
    script.write_text(f"{OTHER_PROCESSOR}run_path('{TRAIN}')")
    for output in start(make_hosts(2), [1, 1], [str(script)]):
        assert "the processors of all hosts must compute the same bits, but" in output.end()
