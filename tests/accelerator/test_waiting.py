"""On the test accelerator a forgotten wait shows, and a hidden one is counted."""

import inspect

import pytest
import torch
from tests.accelerator import sim
from torch import nn

pytestmark = pytest.mark.usefixtures("accelerator")


def pinned(*values):
    return torch.tensor(values).pin_memory()


# Copies that the host does not wait for


def test_a_copy_to_the_host_is_late():
    host, there = torch.zeros(2).pin_memory(), torch.ones(2, device="sim:1")
    host.copy_(there, non_blocking=True)
    assert host.tolist() == [0, 0]
    assert sim.pending_copies(1) == 1
    torch.sim.synchronize(1)
    assert host.tolist() == [1, 1]
    assert sim.pending_copies(1) == 0


def test_so_is_one_to_memory_that_is_not_pinned():
    there = torch.ones(2, device="sim:1")
    host = torch.zeros(2)
    with sim.synchronizations() as seen:
        host.copy_(there, non_blocking=True)
    assert host.tolist() == [0, 0]
    # A GPU may wait for such a copy: neither is to be relied on.
    assert [each.kind for each in seen] == ["copy of pageable memory"]


def test_a_copy_from_the_host_reads_late():
    host, there = pinned(1.0, 2.0), torch.zeros(2, device="sim:1")
    there.copy_(host, non_blocking=True)
    host.fill_(9)
    assert there.tolist() == [9, 9]


WAITS = {
    "stream": lambda stream, event: stream.synchronize(),
    "event": lambda stream, event: event.synchronize(),
    "device": lambda stream, event: torch.accelerator.synchronize(1),
    "number": lambda stream, event: torch.ones(1, device="sim:1").item(),
    "copy": lambda stream, event: torch.ones(1, device="sim:1").cpu(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=list(WAITS))
def test_the_host_reads_what_it_waited_for(wait):
    stream = torch.accelerator.current_stream(1)
    host, there = torch.zeros(2).pin_memory(), torch.ones(2, device="sim:1")
    host.copy_(there, non_blocking=True)
    event = stream.record_event()
    assert host.tolist() == [0, 0]
    wait(stream, event)
    assert host.tolist() == [1, 1]
    assert event.query()
    assert stream.query()


def test_an_event_is_not_done_when_it_is_first_asked():
    host, there = torch.zeros(2).pin_memory(), torch.ones(2, device="sim:1")
    event = torch.Event("sim")
    assert event.query(), "nothing was recorded"
    host.copy_(there, non_blocking=True)
    event.record(torch.accelerator.current_stream(1))
    assert [event.query(), event.query()] == [False, False]
    assert host.tolist() == [0, 0]
    assert event.query()
    assert host.tolist() == [1, 1]


def test_registered_memory_counts_as_pinned():
    memory = torch.zeros(8)
    assert not memory.is_pinned()
    sim.register(memory)
    assert memory[3:].is_pinned()
    sim.unregister(memory)
    assert not memory[3:].is_pinned()


# Streams


def test_work_of_another_stream_has_to_be_waited_for():
    side, tensor = torch.Stream("sim:1"), torch.ones(2, device="sim:1")
    main = torch.accelerator.current_stream(1)
    with pytest.raises(RuntimeError, match=r"stream 4 of sim:1 reads memory that .* writes"), side:
        tensor * 2
    side.wait_stream(main)
    with side:
        doubled = tensor * 2
    with pytest.raises(RuntimeError, match=r"default stream of sim:1 .* aten::mul on stream 4"):
        doubled + 1
    main.wait_event(side.record_event())
    assert (doubled + 1).tolist() == [3, 3]


def test_what_others_still_read_is_not_written():
    side, tensor = torch.Stream("sim:1"), torch.ones(2, device="sim:1")
    side.wait_stream(torch.accelerator.current_stream(1))
    host = torch.zeros(2).pin_memory()
    with side:
        host.copy_(tensor, non_blocking=True)
    with pytest.raises(RuntimeError, match="writes memory that a copy to the host on stream 4"):
        tensor.zero_()
    tensor + 1  # reading beside each other does no harm
    torch.accelerator.current_stream(1).wait_stream(side)
    tensor.zero_()
    torch.sim.synchronize(1)
    assert host.tolist() == [1, 1]


def test_memory_is_not_given_out_while_another_stream_uses_it():
    side, host = torch.Stream("sim:1"), torch.zeros(2).pin_memory()

    def copied_and_freed(recorded):
        tensor = torch.ones(2, device="sim:1")
        side.wait_stream(torch.accelerator.current_stream(1))
        with side:
            host.copy_(tensor, non_blocking=True)
        if recorded:
            tensor.record_stream(side)

    copied_and_freed(recorded=True)
    torch.ones(2, device="sim:1")
    copied_and_freed(recorded=False)
    with pytest.raises(RuntimeError, match="record_stream"):
        torch.ones(2, device="sim:1")
    copied_and_freed(recorded=False)
    torch.accelerator.current_stream(1).wait_stream(side)
    torch.ones(2, device="sim:1")


# Synchronizations


COUNTED = {
    "item": lambda tensor: tensor.sum().item(),
    "result": lambda tensor: tensor.nonzero(),
    "copy to the host": lambda tensor: tensor.cpu(),
    "copy from the host": lambda tensor: torch.ones(2).to("sim:1"),
    "stream": lambda tensor: torch.accelerator.current_stream(1).synchronize(),
    "event": lambda tensor: torch.accelerator.current_stream(1).record_event().synchronize(),
    "device": lambda tensor: torch.sim.synchronize(1),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_wait_of_the_host_is_counted_with_its_place(kind):
    tensor = torch.ones(2, device="sim:1")
    with sim.synchronizations() as seen:
        COUNTED[kind](tensor)
    line = inspect.getsourcelines(COUNTED[kind])[1]
    assert [(each.kind, each.file, each.line) for each in seen] == [(kind, __file__, line)]
    tensor.sum().item()
    assert len(seen) == 1


HIDDEN = {
    "if": lambda tensor: bool(tensor.sum() > 0),
    "mask": lambda tensor: tensor[tensor > 0],
    "indices": lambda tensor: tensor[torch.tensor([0])],
    "assigned mask": lambda tensor: tensor.__setitem__(tensor > 0, 1),
    "equal": lambda tensor: torch.equal(tensor, tensor),
    "unique": lambda tensor: tensor.unique(),
    "print": str,
    "list": lambda tensor: tensor.tolist(),
    "constant": lambda tensor: torch.tensor([1.0, 2.0], device="sim:1"),
    "clipping": lambda tensor: nn.utils.clip_grad_norm_(tensor, 1.0, error_if_nonfinite=True),
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=list(HIDDEN))
def test_hidden_waits_are_counted(hidden):
    tensor = torch.ones(2, device="sim:1", requires_grad=hidden is HIDDEN["clipping"])
    if tensor.requires_grad:
        tensor.sum().backward()
    with sim.synchronizations() as seen:
        hidden(tensor)
    assert {each.file for each in seen} == {__file__}


def test_a_wait_in_the_backward_pass_is_found():
    weight = nn.Parameter(torch.ones(2, device="sim:1"))
    lines = []

    def hook(gradient):
        gradient.sum().item()
        lines.append(inspect.currentframe().f_lineno - 1)

    weight.register_hook(hook)
    with sim.synchronizations() as seen:
        (weight * 2).sum().backward()
    assert [(each.file, each.line) for each in seen] == [(__file__, lines[0])]
