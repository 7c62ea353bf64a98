"""Several models and optimizers in one run: the bits of a plain loop, on any number of workers."""

import pytest
import torch
from tests.classified import cross_entropy as loss
from tests.train import pairs
from torch import nn

import unisono


@pytest.mark.parametrize("name", pairs.PROGRAMS)
def test_one_shard_has_the_bits_of_a_plain_loop(name):
    expected = pairs.in_one_process(name)
    found = pairs.trained(name, shards=1).model.state_dict()
    assert expected.keys() == found.keys()
    for key in expected:
        assert torch.equal(expected[key], found[key]), key


def test_only_the_optimizers_that_are_named_step():
    program, run = pairs.run_of("Distillation")
    teacher = [p.clone() for p in program.teacher.parameters()]
    for step in run.steps(pairs.data(), batch_size=12, steps=2):
        with step:
            before = [p.clone() for p in program.student.parameters()]
            with step.update("student"):
                for batch in step.shards:
                    step.backward(program.of_student(run.model, batch))
            after = list(program.student.parameters())
            assert not any(map(torch.equal, before, after))
    assert all(map(torch.equal, teacher, program.teacher.parameters()))
    assert not run.optimizer.optimizers["teacher"].state


def test_several_updates_of_one_optimizer_draw_other_numbers():
    program, run = pairs.run_of("Distillation", shards=1)
    drawn, losses = [], []
    for step in run.steps(pairs.data(), batch_size=12, steps=2):
        with step:
            for _ in range(3):
                with step.update("teacher"):
                    for batch in step.shards:
                        drawn.append(torch.rand(()).item())
                        step.backward(program.of_teacher(run.model, batch))
                losses.append(step.loss)
        assert step.means["teacher.loss"] == pytest.approx(sum(losses[-3:]) / 3)
        assert step.loss == step.means["loss"] == sum(losses[-3:])
    assert len(set(drawn)) == 6
    assert run.position.step == 2


def test_a_step_without_updates_steps_all_optimizers_from_one_loss():
    _, run = pairs.run_of("Distillation")
    for step in run.steps(pairs.data(), batch_size=12, steps=1):
        with step:
            for inputs, targets in step.shards:
                models = run.model
                outputs = models["teacher"](inputs) + models["student"](inputs)
                step.backward(nn.functional.cross_entropy(outputs, targets))
    assert len(run.optimizer.optimizers["teacher"].state) == 4
    assert step.means.keys() == {"loss"}


def of(names, **options):
    a, b = nn.Linear(6, 2), nn.Linear(6, 2)
    optimizers = {name: torch.optim.SGD({"a": a, "b": b}[name].parameters(), 0.1) for name in names}
    return unisono.Run({"a": a, "b": b}, optimizers, shards=2, **options)


def shared_parameter():
    model = nn.Linear(6, 2)
    each = {name: torch.optim.SGD(model.parameters(), 0.1) for name in ("one", "other")}
    return unisono.Run(model, each)


def scaled_together():
    model = nn.Linear(2, 2)
    optimizer = {"a": torch.optim.SGD(model.parameters(), 1.0)}
    return unisono.Trainer(model, optimizer, lambda model, batch: None, precision="fp16")


def closure_in_one():
    a, b = nn.Linear(6, 2), nn.Linear(6, 2)
    optimizers = {
        "a": torch.optim.LBFGS(a.parameters()),
        "b": torch.optim.SGD(b.parameters(), 0.1),
    }
    return unisono.Run({"a": a, "b": b}, optimizers)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (shared_parameter, ValueError, "`weight` is by 'one' and 'other'"),
        (closure_in_one, ValueError, "requires a closure cannot be combined with several"),
        (lambda: of("a"), ValueError, r"none updates 'b'.*`b.requires_grad_\(False\)`"),
        (lambda: of("ab", clip_norm={"c": 1.0}), ValueError, "'a', 'b', but names 'c'"),
        (lambda: of("ab", clip_norm={"a": -1.0}), ValueError, "`clip_norm` must be above 0"),
        (lambda: of(""), ValueError, "`optimizer` must have at least one entry"),
        (
            lambda: unisono.Run({"a": nn.Linear(2, 2)}, {"a": 3}),
            TypeError,
            "`Optimizer` under each name, but has a int under 'a'",
        ),
        (
            lambda: unisono.Run({"items": nn.Linear(2, 2)}, {}),
            ValueError,
            "at least one entry",
        ),
        (
            lambda: unisono.Run({"a.b": nn.Linear(2, 2)}, torch.optim.SGD([torch.ones(1)], 1.0)),
            ValueError,
            "but has 'a.b': choose a word",
        ),
        (scaled_together, ValueError, "one loss for several optimizers cannot be combined"),
        (
            lambda: unisono.Trainer(
                {"a": nn.Linear(2, 2)}, torch.optim.SGD([torch.ones(1)], 1.0), print
            ),
            TypeError,
            "`unisono.Run`, whose steps have `step.update\\(name\\)`",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_training(make, error, words):
    with pytest.raises(error, match=words):
        make()


def looped(use, name="Distillation", **options):
    program, run = pairs.run_of(name, **options)
    for step in run.steps(pairs.data(), batch_size=12, steps=2):
        with step:
            use(step, lambda batch: program.of_student(run.model, batch))


def update(step, name, loss):
    with step.update(name):
        for batch in step.shards:
            step.backward(loss(batch))


def nobody(step, loss):
    with step.update():
        pass


def within_another(step, loss):
    with step.update("student"), step.update("teacher"):
        pass


def after_a_loop(step, loss):
    for batch in step.shards:
        step.backward(loss(batch))
    update(step, "student", loss)


def shards_after_an_update(step, loss):
    update(step, "student", loss)
    list(step.shards)


def all_at_once(step, loss):
    for batch in step.shards:
        step.backward(loss(batch))


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda s, loss: update(s, "critic", loss), ValueError, "'student', each once.*'critic'"),
        (nobody, ValueError, "but got nothing"),
        (lambda s, loss: None, RuntimeError, "have no loss: loop over all of `step.shards`"),
        (within_another, RuntimeError, "one block after another"),
        (after_a_loop, RuntimeError, "one block after another"),
        (shards_after_an_update, RuntimeError, "iterated only once"),
        (
            lambda s, loss: update(s, "student", lambda batch: loss(batch).detach()),
            ValueError,
            "the loss must depend",
        ),
    ],
)
def test_a_wrong_use_of_updates_says_what_to_do(use, error, words):
    with pytest.raises(error, match=words):
        looped(use)


def test_scaled_losses_are_of_one_optimizer_at_a_time():
    with pytest.raises(ValueError, match=r"this update is of several.*step.update\('teacher'\)"):
        looped(all_at_once, "Scaled")


def test_a_run_with_one_optimizer_has_no_updates_by_name():
    model = nn.Linear(6, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), 0.1), shards=1)
    with pytest.raises(ValueError, match="write `with step:` alone"):
        for step in run.steps(pairs.data(), batch_size=12, steps=1):
            with step:
                update(step, "model", None)


def test_an_error_within_an_update_says_where():
    def fail(batch):
        raise KeyError("mine")

    with pytest.raises(KeyError) as raised:
        looped(lambda step, loss: update(step, "student", fail))
    (note,) = raised.value.__notes__
    assert "in step 0, in the update of student, in the forward pass of shard 0" in note


def test_a_loss_must_depend_on_the_parameters_that_its_update_changes():
    program, run = pairs.run_of("Distillation")
    with pytest.raises(ValueError, match="in step 0 none of 'student' has a gradient"):
        for step in run.steps(pairs.data(), batch_size=12, steps=1):
            with step:
                update(step, "student", lambda batch: program.teacher(batch[0]).square().mean())


def test_a_loss_that_is_not_finite_says_that_other_updates_stay():
    program, run = pairs.run_of("Distillation")
    with pytest.raises(unisono.errors.NonFiniteLossError) as raised:
        for step in run.steps(pairs.data(), batch_size=12, steps=2):
            with step:
                update(step, "student", lambda batch: program.of_student(run.model, batch))
                update(step, "teacher", lambda batch: program.teacher(batch[0]).mean() / 0)
    assert "This was in step 0, in the update of teacher; updates" in raised.value.__notes__[-1]


def test_a_trainer_steps_several_optimizers_of_one_model():
    def made():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        head = torch.optim.Adam(model[2].parameters(), 1e-2)
        optimizers = {"trunk": torch.optim.SGD(model[0].parameters(), 0.1), "head": head}
        return model, optimizers, torch.optim.lr_scheduler.StepLR(head, 1, 0.5)

    model, optimizers, schedule = made()
    trainer = unisono.Trainer(model, optimizers, loss, shards=1, schedule=schedule)
    trainer.fit(pairs.data(), batch_size=12, epochs=2, shuffle=False)
    plain, optimizers, schedule = made()
    for _ in range(2):
        for start in (0, 12, 24):
            plain.zero_grad()
            loss(plain, pairs.data()[start : start + 12]).backward()
            for optimizer in optimizers.values():
                optimizer.step()
        schedule.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exchange", "fault"),
    [
        ("Gan", "shared", ("shard", 2, 0)),
        ("Gan", "shared", ("updated", 3, 1)),
        ("Gan", "staged", ("update", 3, 1)),
        ("Gan", "gloo", ("gradients", 2, 1)),
        ("ActorCritic", "shared", ("updated", 4, 0)),
        ("Distillation", "shared", ("updated", 4, 0)),
        ("Distillation", "shared", ("sums", 4, 1)),
    ],
)
def test_a_worker_that_is_killed_in_any_update_costs_nothing(
    monkeypatch, tmp_path, name, exchange, fault
):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    marker = tmp_path / "killed"
    found = unisono.launch(pairs.train_with, name, 0, fault, marker, workers=3)
    assert found == [pairs.train(name)] * 3
    assert marker.exists()


def forgetful(name):
    program, run = pairs.run_of(name)
    for step in run.steps(pairs.data(), batch_size=12, steps=5):
        with step:
            for names, loss_of in program.updates.items():
                if run._context.team.world.rank == 1 and step.number == 3 and names == ("teacher",):
                    continue
                update(step, *names, lambda batch, loss_of=loss_of: loss_of(run.model, batch))


@pytest.mark.slow
def test_workers_that_make_other_updates_are_told_so():
    with pytest.raises(unisono.UnisonoError, match=r"to `gradients 3.0 student`"):
        unisono.launch(forgetful, "Distillation", workers=2)
