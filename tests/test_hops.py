"""The way of one batch, from the call that computes a step to its updated parameters, is short.

A hop is a file that calls another, counted once. They are measured while a plain step is computed
in one process, and compared with the table in `docs/architecture.md`.
"""

import re
import sys
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import unisono

PACKAGE = Path(unisono.__file__).parent
PAGE = PACKAGE.parents[1] / "docs" / "architecture.md"
ROW = re.compile(r"^(\S+\.py) +→ (\S+\.py)", re.MULTILINE)


class Hops(unisono.callbacks.Callback):
    """Notes which file calls which while step 2 is computed."""

    def __init__(self):
        self.seen = {}
        # As one of ours: where the program has callbacks, a step looks at what they have changed.
        type(self).__module__ = "unisono.hops"

    def on_step_begin(self, fit):
        if fit.step == 3:
            sys.setprofile(self._note)

    def _note(self, frame, event, _):
        if event == "return" and frame.f_code is unisono.training.step.Step.__exit__.__code__:
            sys.setprofile(None)
        if event == "call" and (callee := file_of(frame)) is not None:
            caller = frame.f_back
            while caller is not None and file_of(caller) is None:
                caller = caller.f_back
            here = file_of(caller) if caller is not None else None
            if here not in (None, callee, "training/callbacks/callback.py"):
                self.seen[file_of(caller), callee] = None


def file_of(frame):
    """Name the file of the package that a frame is in; None if it is elsewhere."""
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def hops():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(40, 3), torch.randint(0, 2, (40,)))
    seen = Hops()
    try:
        unisono.Trainer(
            model,
            optimizer,
            lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
            shards=1,
            callbacks=[seen],
        ).fit(data, batch_size=10, steps=5)
    finally:
        sys.setprofile(None)
    return list(seen.seen)


def test_the_table_of_hops_is_what_a_step_does():
    rows = ROW.findall(PAGE.read_text())
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(hops())


def test_one_batch_takes_few_hops_and_changes_of_room():
    found = hops()
    rooms = [(caller.partition("/")[0], callee.partition("/")[0]) for caller, callee in found]
    changes = {(here, there) for here, there in rooms if here != there}
    assert len(found) <= 33
    assert len(changes) <= 8
