import torch
from torch import nn

from unisono.engine.state.contents import digest_of
from unisono.engine.state.load import plain_weights


def make(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def test_equal_states_have_equal_digests():
    assert digest_of(*make()) == digest_of(*make())


def test_every_kind_of_state_counts():
    digests = {digest_of(*make()), digest_of(*make(torch.float64))}
    model, optimizer = make()
    model[0].weight.data[0, 0] += 1e-6
    digests.add(digest_of(model, optimizer))
    model, optimizer = make()
    model[1].num_batches_tracked += 1
    digests.add(digest_of(model, optimizer))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        model, optimizer = make()
        optimizer.state[model[0].bias][key] += 1
        digests.add(digest_of(model, optimizer))
    for added in (0, 1):
        model, optimizer = make()
        optimizer.state[model[0].bias]["past"] = [{"a": torch.zeros(2) + added}]
        digests.add(digest_of(model, optimizer))
        model, optimizer = make()
        optimizer.state["k"] = torch.tensor([added])
        digests.add(digest_of(model, optimizer))
    assert len(digests) == 11


def test_the_layout_in_memory_does_not_count():
    model, optimizer = make()
    before = digest_of(model, optimizer)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert digest_of(model, optimizer) == before


def test_wrappers_leave_no_prefix_in_the_names():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = make()[0]
    assert plain_weights(Wrapper(model)).keys() == model.state_dict().keys()
