"""docs/events.md describes what is written."""

import json
import re
from pathlib import Path

import pytest
import torch
from tests.classified import cross_entropy as loss
from torch.utils.data import TensorDataset

import unisono
from unisono.training.events.events import read_event

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()


def examples():
    for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL):
        yield from block.replace("\n ", "").splitlines()


@pytest.mark.parametrize("line", list(examples()), ids=lambda line: json.loads(line)["event"])
def test_every_example_can_be_read(line):
    assert read_event(line.encode()) is not None


def test_every_kind_has_an_example():
    kinds = ["start", "step", "evaluation", "checkpoint", "workers", "went_back"]
    kinds += ["failure", "interrupted", "end"]
    assert [json.loads(line)["event"] for line in examples()] == kinds


def test_all_that_a_run_writes_is_described(tmp_path):
    x = torch.randn(40, 6)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model = torch.nn.Linear(6, 2)

    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss,
        shards=2,
        directory=tmp_path,
        checkpoint=2,
    )
    trainer.fit(data, batch_size=10, epochs=1, validate=data)
    with pytest.raises(unisono.errors.NonFiniteLossError):
        nan = TensorDataset(torch.full((20, 6), torch.nan), torch.zeros(20, dtype=torch.int64))
        trainer.fit(nan, batch_size=10, epochs=3)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    written = {event["event"]: event.keys() for event in map(json.loads, lines)}
    told = {event["event"]: event.keys() for event in map(json.loads, examples())}
    unusual = {"workers", "went_back", "interrupted"}
    assert written.keys() == told.keys() - unusual
    for kind, names in written.items():
        assert names | ({"delayed_s"} if kind == "step" else set()) == told[kind], kind
    missing = {name for names in written.values() for name in names if f"`{name}`" not in PAGE}
    assert missing == set()
