"""A program may copy and save its whole model at any time, in a pass as between steps."""

import copy
import io

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from torch import nn

import unisono


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def best_model():
    """Keep the model of the smallest loss; return its weights, and those of the last step."""
    model = net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=3)
    best, smallest = None, float("inf")
    # The last batch leaves a shard with a single sample, so hooks wait for it.
    for step in run.steps(by_sign(33), batch_size=12, steps=5, drop_last=True):
        with step:
            for batch in step.shards:
                before = [saved(model), copy.deepcopy(model)]
                step.backward(cross_entropy(model, batch))
                for one in (*before, saved(model), copy.deepcopy(model)):
                    assert torch.equal(one[0].weight, model[0].weight)
                    one.eval()(batch[0])
        if step.loss < smallest:
            smallest, best = step.loss, copy.deepcopy(model)
        for name, value in saved(model).state_dict().items():
            assert torch.equal(value, model.state_dict()[name])
    return [value.tolist() for value in best.state_dict().values()], run.digest()


def test_a_model_can_be_copied_and_saved_in_a_loop():
    kept, _ = best_model()
    assert len(kept) == 9


@pytest.mark.slow
def test_copies_are_the_same_on_two_workers():
    assert unisono.launch(best_model, workers=2) == [best_model()] * 2
