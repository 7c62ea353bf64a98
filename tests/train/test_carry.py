"""Hidden state from batch to batch: the bits of a plain loop, on any number of workers."""

import math
import os
import signal

import pytest
import torch
from tests.train import carried
from tests.train.carried import BATCH_SIZE, data, loss_of, train, trainer
from torch import nn
from torch.utils.data import Subset, TensorDataset

import unisono


@pytest.mark.parametrize("model", carried.MODELS)
@pytest.mark.parametrize("optimizer", carried.OPTIMIZERS)
def test_one_shard_has_the_bits_of_a_plain_loop(model, optimizer):
    expected = carried.in_one_process(model, optimizer)
    made = trainer(model, 1, optimizer)
    made.fit(data(), batch_size=BATCH_SIZE, steps=carried.STEPS, shuffle=False)
    for mine, theirs in zip(made.run.model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_each_shard_has_its_own_state_from_the_start_of_an_epoch():
    seen = []

    def loss(model, batch, state):
        first = batch[0][:, 0].tolist()
        seen.append((first, state))
        assert state is None or not state["of"].requires_grad
        value = model(batch[0])[0].mean()
        return value, {"of": torch.tensor(first) * model.head.bias.sum()[None], "first": first}

    made = trainer("recurrent", 4, loss=loss)
    made.fit(data(), batch_size=BATCH_SIZE, epochs=2, shuffle=False)
    steps = [seen[at : at + 4] for at in range(0, len(seen), 4)]
    assert len(steps) == 12
    for number, step in enumerate(steps):
        for shard, (_, state) in enumerate(step):
            if number % 6:
                assert state["first"] == steps[number - 1][shard][0]
            else:
                assert state is None


def test_a_program_may_change_what_it_gets_and_what_it_has_given():
    given = []

    def in_place(model, batch, state):
        while given:
            given.pop().zero_()
        mine = None if state is None else tuple(part.clone() for part in state)
        for part in state or ():
            part.zero_()
        loss, following = loss_of(model, batch, mine)
        given.extend(part.detach() for part in following)
        return loss, following

    assert train(loss=in_place, optimizer="sam") == train(optimizer="sam")


def test_a_state_that_is_not_set_stays():
    made = trainer("recurrent", 4)
    seen = []
    for step in made.run.steps(data(), batch_size=BATCH_SIZE, epochs=1, shuffle=False):
        with step:
            for batch in step.shards:
                seen.append(step.carried)
                if step.number == 1:
                    step.carried = [step.number, "text", torch.ones(2)]
                step.backward(made.run.model(batch[0])[0].mean())
    assert seen[:8] == [None] * 8
    for number, text, ones in seen[8:]:
        assert (number, text, ones.tolist()) == (1, "text", [1.0, 1.0])


def test_a_loop_of_ones_own_carries():
    made = trainer("recurrent")
    run = made.run
    for step in run.steps(data(), batch_size=BATCH_SIZE, steps=carried.STEPS, shuffle=False):
        with step:
            for batch in step.shards:
                loss, step.carried = loss_of(step.model, batch, step.carried)
                step.backward(loss)
    assert made.digest() == train()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fit",
    [
        {"validate": data(batches=2), "validate_every": 1},
        {"loader_workers": 1},
    ],
)
def test_validation_and_loader_processes_change_no_state(fit):
    assert train(fit=fit) == train()


def test_an_evaluation_begins_with_nothing_and_goes_on_from_batch_to_batch():
    made = trainer("recurrent", 2)
    model, dataset = made.run.model.eval(), data(batches=3)
    total, outputs, state = 0.0, [], None
    with torch.no_grad():
        for number in range(3):
            batch = [
                torch.stack(part)
                for part in zip(*(dataset[8 * number + row] for row in range(8)), strict=True)
            ]
            logits, following = model(batch[0], state)
            loss, state = loss_of(model, batch, state)
            assert torch.equal(following[0], state[0])
            total += loss.item() / 3
            outputs.append(logits)
    for _ in range(2):
        found = made.evaluate(
            dataset,
            batch_size=BATCH_SIZE,
            metrics={"rows": lambda rows, targets: (rows.argmax(-1) == targets).sum()},
        )
        assert found["loss"] == pytest.approx(total, rel=1e-6)
        assert made.predict(dataset, batch_size=BATCH_SIZE).shape == (24, 5, 11)
        rows = made.predict(dataset, batch_size=BATCH_SIZE)
        assert torch.allclose(rows, torch.cat(outputs), atol=1e-6)
    matches = (torch.cat(outputs).argmax(-1) == torch.stack([y for _, y in dataset])).sum()
    assert found["rows"] == matches


def test_losses_and_forward_functions_carry_states_of_their_own():
    def count(model, batch, state):
        assert state is None or isinstance(state, dict)
        so_far = 0 if state is None else state["so far"]
        return (torch.full((len(batch[0]),), so_far), batch[1]), {"so far": so_far + 1}

    made, metrics = trainer("recurrent"), {"sum": lambda counts, targets: counts.sum()}
    found = made.evaluate(data(), batch_size=BATCH_SIZE, metrics=metrics, forward=count)
    assert found == made.evaluate(data(), batch_size=BATCH_SIZE) | {"sum": 8 * 15}


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [3, 6])
def test_a_run_is_resumed_in_the_midst_of_an_epoch(tmp_path, stopped_at):
    for name in carried.MODELS:
        options = {"directory": tmp_path / name}
        train(name, steps=stopped_at, **options)
        assert train(name, **options) == train(name)


def test_a_later_call_goes_on_in_the_midst_of_an_epoch():
    made = trainer("memory")
    for steps in (2, 5, carried.STEPS):
        made.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False)
    assert made.digest() == train("memory")[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"devices": ["cpu", "cpu"]}, {"exchange": "staged"}])
def test_several_devices_and_exchanges_have_the_same_bits(options):
    assert train(**options) == train()
    assert train(optimizer="sam", **options) == train(optimizer="sam")


@pytest.mark.slow
def test_the_bits_are_the_same_on_accelerators(accelerator):
    for name in carried.MODELS:
        there = train(name, device="cpu")
        for devices in (["sim"], ["sim:0", "sim:2", "sim:1"]):
            # `evaluate` too, but where torch has an attention of its own for CPUs.
            alike = train(name, devices=devices)
            assert alike[0] == there[0]
            assert name == "memory" or alike == there


@pytest.mark.slow
def test_a_split_model_carries(accelerator):
    model, optimizer, _ = carried.made("recurrent")
    there = {"sim:0": ["embed"], "sim:1": ["lstm", "head"]}
    unisono.split(model, list(there), balance={0: there["sim:0"], 1: there["sim:1"]})
    made = unisono.Trainer(model, optimizer, loss_of, shards=4, carry=True)
    made.fit(data(), batch_size=BATCH_SIZE, steps=carried.STEPS, shuffle=False)
    assert made.digest() == train(device="cpu")[0]


def test_what_is_not_finite_is_found_with_the_state_that_led_there():
    states = []

    def loss(model, batch, state):
        states.append(state)
        value, following = loss_of(model, batch, state)
        return value * (math.inf if len(states) > 8 else 1.0), following

    made = trainer("recurrent", 4, loss=loss)
    with pytest.raises(unisono.NonFiniteLossError):
        made.fit(data(), batch_size=BATCH_SIZE, epochs=1, shuffle=False)
    for mine, again in zip(states[8], states[-1], strict=True):
        assert torch.equal(mine, again)


def fit(**options):
    dataset = options.pop("dataset", data())
    told = {"batch_size": BATCH_SIZE, "epochs": 1, "shuffle": False} | options.pop("fit", {})
    trainer("recurrent", **options).fit(dataset, **told)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"fit": {"shuffle": None}}, ValueError, "`shuffle` must be False with `carry=True`"),
        ({"shards": 3}, ValueError, r"multiple of `shards` \(3\) .*: pass `batch_size=6`"),
        (
            {"dataset": Subset(data(), range(20))},
            ValueError,
            "but is 20: leave out 4, as `unisono.data.continuing_rows` does",
        ),
        ({"fit": {"validate": Subset(data(), range(9))}}, ValueError, "but is 9: leave out 1"),
        (
            {"loss": lambda model, batch: 0},
            TypeError,
            r"takes \(model, batch\): with `carry=True`, take the state",
        ),
        (
            {"loss": lambda *given: loss_of(*given)[0]},
            TypeError,
            r"pair \(loss, state\).*returned Tensor",
        ),
        (
            {"loss": lambda *given: (loss_of(*given)[0], 8)},
            TypeError,
            r"returned \(Tensor, int\): .* `return \(sum, weight\), state`",
        ),
        (
            {"loss": lambda *given: (loss_of(*given)[0], nn.Linear(2, 2))},
            TypeError,
            "what is carried must be tensors, numbers and texts.* of type Linear",
        ),
        (
            {"loss": lambda *given: (loss_of(*given)[0], [torch.eye(2).to_sparse()])},
            TypeError,
            r"what is carried must be .* `carried/0` must be dense .* but is torch.sparse_coo",
        ),
        ({"embed": lambda m, b: m(b)}, ValueError, "`carry` must be left out where `embed`"),
    ],
)
def test_what_does_not_fit_is_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        fit(**options)


def test_a_forward_function_takes_a_state_too():
    made = trainer("recurrent")
    with pytest.raises(
        TypeError, match=r"`forward` must .* but takes \(m, b\): .*\(outputs, state"
    ):
        made.predict(data(), batch_size=BATCH_SIZE, forward=lambda m, b: m(b[0]))
    with pytest.raises(TypeError, match=r"or `carry=True` if the third is a state"):
        unisono.Trainer(made.run.model, made.run.optimizer, loss_of)


def test_what_belongs_to_a_batch_is_asked_for_in_its_place():
    run = trainer("recurrent").run
    steps = run.steps(data(), batch_size=BATCH_SIZE, steps=1, shuffle=False)
    step = next(steps)
    with pytest.raises(RuntimeError, match=r"belongs to a batch of `step\.shards`"), step:
        step.carried = 3
    model = nn.Linear(2, 2)
    plain = unisono.Run(model, torch.optim.SGD(model.parameters()), shards=2)
    steps = plain.steps(TensorDataset(torch.ones(4, 2)), batch_size=4, steps=1)
    step = next(steps)
    with pytest.raises(RuntimeError, match="is there with `carry=True`"), step:
        assert step.carried
    with pytest.raises(TypeError, match="`carry` must be True or False"):
        unisono.Run(model, torch.optim.SGD(model.parameters()), carry="yes")


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged"])
def test_digest_is_the_same_on_any_number_of_workers(monkeypatch, exchange):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    alone = train("memory")
    for workers in (2, 3):
        assert unisono.launch(train, "memory", workers=workers) == [alone] * workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "exchange"),
    [
        ("kill:rank=1,step=2,at=shard; kill:rank=0,step=8,at=gradients", "shared"),
        ("kill:rank=1,step=3,at=updated; kill:rank=2,step=4,at=commit", "shared"),
        ("kill:rank=2,step=3,at=sums; kill:rank=0,step=7,at=updated", "staged"),
        ("kill:rank=0,step=4; kill:rank=1,step=4; kill:rank=2,step=4", "shared"),
    ],
)
def test_a_worker_that_is_killed_costs_nothing(monkeypatch, faults, exchange):
    alone = train()
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(train, workers=3) == [alone] * 3


def train_and_die(marker, call):
    """Train; rank 1 dies as it computes a loss for the `call`-th time, once."""
    calls = []

    def loss(model, batch, state):
        calls.append(1)
        if len(calls) == call and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(model, batch, state)

    return train(loss=loss, optimizer="sam")


@pytest.mark.slow
@pytest.mark.parametrize("call", [4, 22])  # the second evaluation of a step; in `evaluate`
def test_a_worker_may_be_lost_in_any_pass(tmp_path, call):
    marker = tmp_path / "killed"
    assert unisono.launch(train_and_die, marker, call, workers=3) == [train(optimizer="sam")] * 3
    assert marker.exists()


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_workers(tmp_path):
    unisono.launch(stop_early, tmp_path / "run", workers=3)
    assert train(directory=tmp_path / "run") == train()


def stop_early(directory):
    return train(steps=4, directory=directory)


def in_two_calls():
    """Train the rest of a model first, then all of it: with another memory."""
    model, _, _ = carried.made("recurrent")
    optimizer = torch.optim.SGD([*model.embed.parameters(), *model.lstm.parameters()], lr=0.5)
    made = unisono.Trainer(model, optimizer, loss_of, shards=4, carry=True)
    made.fit(data(), batch_size=BATCH_SIZE, steps=2, shuffle=False)
    optimizer.add_param_group({"params": model.head.parameters()})
    made.fit(data(), batch_size=BATCH_SIZE, steps=5, shuffle=False)
    return made.digest()


@pytest.mark.slow
def test_every_worker_has_all_states_when_a_loop_has_ended(monkeypatch):
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=2,at=shard")
    assert unisono.launch(in_two_calls, workers=2) == [in_two_calls()] * 2
