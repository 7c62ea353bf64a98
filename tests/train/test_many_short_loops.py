"""A program of many short loops collects its data between them, and resumes in the midst."""

import contextlib
import re

import pytest
import torch
from tests.promises import promise
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.exchange import arena
from unisono.errors import CheckpointError
from unisono.programs import holders
from unisono.runtime.checkpoint import run_directory
from unisono.training.callbacks import callback
from unisono.training.callbacks.callback import Callback
from unisono.training.growth import Growth
from unisono.training.rehearsals import Rehearsals
from unisono.training.run import context_of

LOOPS = 16


class StoppedError(Exception):
    pass


class EnoughError(Exception):
    pass


def rollouts(directory=None, stops_in=None, of_policy=True):
    """Collect data with the policy, train for four steps, and so on; returns the digest."""
    torch.manual_seed(0)
    policy = nn.Linear(4, 1)
    options = {"directory": directory, "checkpoint": 1} if directory else {}
    run = unisono.Run(policy, torch.optim.Adam(policy.parameters(), 1e-2), shards=2, **options)
    state = torch.zeros(4)  # of the environment
    for loop in range(1, LOOPS + 1):
        seen = torch.randn(32, 4) + state
        if of_policy:
            state = state + 0.1 * (seen.mean(0) + policy.weight.detach()[0])
        for step in run.steps(TensorDataset(seen), batch_size=8, epochs=loop):
            with step:
                for (rows,) in step.shards:
                    step.backward((policy(rows) - 1).pow(2).mean())
            if loop == stops_in and step.batch == 1:
                raise StoppedError
    return run.digest(), run.position.step, state.tolist()


@promise("conditions.1")
@pytest.mark.parametrize("loop", [2, 9, 11, 15])
def test_it_ends_as_one_that_was_never_stopped(tmp_path, loop):
    with pytest.raises(StoppedError):
        rollouts(tmp_path, stops_in=loop)
    assert rollouts(tmp_path) == rollouts()


@promise("conditions.1")
def test_data_that_older_weights_have_made_are_refused_where_these_are_gone(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(run_directory, "_ENDS_BYTES", 0)  # as of a large model
    with pytest.raises(StoppedError):
        rollouts(tmp_path / "policy", stops_in=11)
    with pytest.raises(CheckpointError, match="the program has computed them from the newest"):
        rollouts(tmp_path / "policy")
    assert "the final state of this call is no longer kept" in capsys.readouterr().err
    undisturbed = rollouts(of_policy=False)
    with pytest.raises(StoppedError):
        rollouts(tmp_path / "any", stops_in=11, of_policy=False)
    assert rollouts(tmp_path / "any", of_policy=False) == undisturbed


def phases(directory=None, stops_in=None, raises=False):
    """Train in phases with falling losses, each left after three steps; returns the digest."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options = {"directory": directory, "checkpoint": 1} if directory else {}
    run = unisono.Run(model, torch.optim.Adam(model.parameters(), 1e-2), shards=2, **options)
    data = TensorDataset(torch.randn(32, 4))
    for phase in range(1, LOOPS + 1):
        with contextlib.suppress(EnoughError):
            for step in run.steps(data, batch_size=8, steps=1000):
                with step:
                    if raises and step.number == 3 * phase:
                        raise EnoughError
                    for (rows,) in step.shards:
                        step.backward((model(rows) - 1 / phase).pow(2).mean())
                if phase == stops_in and step.number == 3 * phase - 2:
                    raise StoppedError
                if not raises and step.number == 3 * phase - 1:
                    break
    return run.digest(), run.position.step


@promise("conditions.1")
@pytest.mark.parametrize("raises", [False, True])
def test_loops_left_early_stay_over_where_what_they_ended_with_is_not_kept(
    tmp_path, monkeypatch, raises
):
    monkeypatch.setattr(run_directory, "_ENDS_BYTES", 0)  # as of a large model
    with pytest.raises(StoppedError):
        phases(tmp_path, stops_in=11, raises=raises)
    assert phases(tmp_path, raises=raises) == phases(raises=raises)


def short_loops(counts_from_loop):
    """Twenty-four loops of three steps; from one of them on the loss counts shards."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), 1e-2), shards=2)
    data, num_shards = TensorDataset(torch.randn(24, 4)), [0]
    for loop in range(1, 25):
        for step in run.steps(data, batch_size=8, epochs=loop):
            with step:
                for (rows,) in step.shards:
                    num_shards[0] += loop >= counts_from_loop
                    step.backward((model(rows) * (1 + num_shards[0])).pow(2).mean())


@promise("one-result.15")
def test_of_many_loops_in_one_place_a_few_are_looked_at_closely(monkeypatch):
    looked_at, of_body = [], Rehearsals.of_body

    def counted(rehearsals, taking):
        looked_at.append(rehearsals._run.kept.position.step)
        return of_body(rehearsals, taking)

    monkeypatch.setattr(Rehearsals, "of_body", counted)
    short_loops(counts_from_loop=100)
    first = {3 * (loop - 1) + at for loop in (*range(1, 9), 16, 24) for at in (0, 1)}
    assert looked_at == sorted(first | {0, 1, 2, 4, 8, 16, 32, 64})


@pytest.mark.parametrize("loop", [1, 2, 8, 9, 16, 17])
def test_a_loop_that_begins_to_count_late_is_refused(loop):
    with pytest.raises(RuntimeError, match="carries over from one shard to the next"):
        short_loops(counts_from_loop=loop)


def limited(directory=None, stops_in=None, by_weights=False):
    """Train in rounds that end by what their loops left; returns the digest and the rounds."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    options = {"directory": directory, "checkpoint": 1} if directory else {}
    run = unisono.Run(model, torch.optim.Adam(model.parameters(), 1e-2), shards=2, **options)
    data, found = TensorDataset(torch.randn(16, 4)), []
    for number in range(1, 3 * LOOPS if by_weights else LOOPS + 1):
        for _ in range(3):
            total = 0.0
            for step in run.steps(data, batch_size=8, epochs=run.position.epoch + 1):
                with step:
                    for (rows,) in step.shards:
                        step.backward((model(rows) - number).pow(2).mean())
                if stops_in == step.epoch and step.batch == 1:
                    raise StoppedError
                total += step.loss
            with torch.no_grad():
                now = int(1e6 * model.weight.abs().sum()) % 3 == 0
            if now if by_weights else int(1000 * (step.means["loss"] + total)) % 2:
                break
        found.append((number, step.number))
    return run.digest(), found


@promise("conditions.1")
def test_what_older_loops_left_in_variables_is_there_without_what_they_ended_with(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_directory, "_ENDS_BYTES", 0)  # as of a large model
    with pytest.raises(StoppedError):
        limited(tmp_path, stops_in=20)
    assert limited(tmp_path) == limited()
    assert len(list((tmp_path / "checkpoints").glob("ended-*"))) > 8


@promise("conditions.1")
@pytest.mark.parametrize("loop", [20, 24])
def test_a_course_that_follows_from_newer_weights_is_reported(tmp_path, monkeypatch, capsys, loop):
    monkeypatch.setattr(run_directory, "_ENDS_BYTES", 0)  # as of a large model
    with pytest.raises(StoppedError):
        limited(tmp_path, stops_in=loop, by_weights=True)
    capsys.readouterr()
    with contextlib.suppress(CheckpointError):
        limited(tmp_path, by_weights=True)
    said = capsys.readouterr().err
    assert said.count("the program must take the same course again") == 1
    assert re.search(r"loop number \d+ `\w+` \(limited\) is \d+ and was \d+ before", said)


def test_only_as_many_reduced_ends_stay_as_their_number_and_size_allow(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "_ENDS_BYTES", 0)
    monkeypatch.setattr(run_directory, "_REDUCED_AT_MOST", 5)
    phases(tmp_path)
    left = sorted(one.name for one in (tmp_path / "checkpoints").glob("ended-*"))
    assert left == [f"ended-{3 * loop:012}" for loop in range(3, 8)]
    assert {one.name for one in (tmp_path / "checkpoints" / left[0]).iterdir()} == {
        *("run.json", "commit.json", "end-of-loop")
    }


def mean(model, batch):
    return model(batch[0]).square().mean()


def looped(between=lambda loop, run: None, loops=LOOPS):
    """Train in loops of two steps, and call `between` after each; returns the run."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    run = unisono.Run(model, torch.optim.Adam(model.parameters(), 1e-2), shards=2)
    data = TensorDataset(torch.randn(8, 64))
    for loop in range(1, loops + 1):
        for step in run.steps(data, batch_size=4, epochs=loop):
            with step:
                for batch in step.shards:
                    step.backward(mean(model, batch))
        between(loop, run)
    return run


@pytest.mark.parametrize(("at_most", "are_kept"), [(64 << 20, True), (0, False)])
def test_a_single_worker_keeps_the_memory_of_a_small_model_between_loops(
    monkeypatch, at_most, are_kept
):
    monkeypatch.setattr(arena, "_KEPT_BYTES", at_most)
    kept = []

    def look(loop, run):
        memory = context_of(run).memory.arena
        places = memory.parameters.tensor(0), memory.gradients[0].everything()
        kept.append([bool(place.any()) for place in places])

    digest = looped(look, loops=3).digest()
    assert kept == [[are_kept, are_kept]] * 3
    monkeypatch.undo()
    assert looped(loops=3).digest() == digest


def test_data_that_do_not_change_are_hashed_once(monkeypatch):
    read, usual = [], holders.hashed

    def hashed(value, at_most):
        read.append(getattr(value, "shape", None))
        return usual(value, at_most)

    monkeypatch.setattr(holders, "hashed", hashed)
    looped(lambda loop, run: read.append(loop))
    assert (8, 64) not in read[read.index(9) : read.index(15)]  # those are not rehearsed


def test_of_many_fits_the_first_eight_and_every_eighth_try_the_loss_on_halves(monkeypatch):
    seen = []
    monkeypatch.setattr(Growth, "_check", lambda self, *given: seen.append(self._run.num_loops))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), mean, shards=2)
    for fit in range(1, 27):
        trainer.fit(TensorDataset(torch.randn(8, 4)), batch_size=4, steps=fit)
    assert seen == [*range(1, 9), 9, 17, 25]


def test_methods_that_a_callback_inherits_are_not_looked_into(monkeypatch):
    class Mine(Callback):
        def on_step_end(self, fit, result):
            pass

    def looked_into(method):
        seen.append(method.__name__)
        return signature(method)

    seen, signature = [], callback.signature
    monkeypatch.setattr(callback, "signature", looked_into)
    callback.check_moments([Mine()])
    assert {*seen} == {"on_step_end"}
