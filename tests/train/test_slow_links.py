"""Fewer bytes between groups of shards: what each way is, and one digest for all workers."""

import pytest
import torch
from tests.train import slow_links
from tests.train.slow_links import BATCH_SIZE, LINKS, STEPS, data, train, trainer
from torch import nn

import unisono

DILOCO = unisono.DiLoCo(local_steps=3, groups=2)


def same(mine, theirs):
    pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("link", LINKS)
def test_each_is_what_torch_alone_computes(link):
    found = trainer(link, shards=2, kind="sgd")
    found.fit(data(), batch_size=BATCH_SIZE, steps=STEPS, shuffle=False)
    assert same(found.run.model, slow_links.REFERENCES[link]())
    assert not same(found.run.model, trainer(None, shards=2, kind="sgd").run.model)


@pytest.mark.parametrize("link", LINKS)
def test_sums_and_means_are_the_same_loss(link):
    means, sums = (
        trainer(link, kind="sgd", loss=loss) for loss in (slow_links.loss_of, slow_links.sum_of)
    )
    for one in (means, sums):
        one.fit(data(), batch_size=12, steps=STEPS, shuffle=False)
    for mine, theirs in zip(means.run.model.parameters(), sums.run.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)


@pytest.mark.parametrize("link", LINKS)
def test_a_run_goes_on_with_what_was_kept(tmp_path, link):
    for steps in (4, STEPS):  # in the midst of local steps, too
        found = train(link, steps=steps, directory=tmp_path)
    assert found == train(link)
    assert any(found[1].values())


@pytest.mark.parametrize("link", LINKS)
def test_a_later_call_goes_on_too(link):
    made = trainer(link)
    for steps in (1, 4, STEPS):
        made.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False)
    assert (made.digest(), slow_links.kept_by(made)) == train(link)


def test_groups_begin_anew_where_the_program_has_changed_parameters():
    made = trainer(DILOCO)
    made.fit(data(), batch_size=BATCH_SIZE, steps=4, shuffle=False)
    with torch.no_grad():
        made.run.model.rare.fill_(0.5)
    made.fit(data(), batch_size=BATCH_SIZE, steps=5, shuffle=False)
    kept = made.run.state["slow_link"].state_dict()
    assert all((kept[f"parameters of group {n}"]["rare"] < 0.9).all() for n in range(2))


def test_in_between_the_model_has_the_parameters_of_the_last_outer_step():
    made, seen = trainer(DILOCO), []
    before = torch.cat([p.detach().flatten() for p in made.run.model.parameters()])
    for step in made.run.steps(data(), batch_size=BATCH_SIZE, steps=6, shuffle=False):
        with step:
            for batch in step.shards:
                step.backward(slow_links.loss_of(made.run.model, batch))
        now = torch.cat([p.detach().flatten() for p in made.run.model.parameters()])
        seen.append(not torch.equal(now, before))
        before = now
    assert seen == [False, False, True, False, False, True]


def test_groups_are_clipped_by_their_own_norms():
    made, norms = trainer(DILOCO, kind="sgd", clip_norm=1e-3), []
    start = [p.detach().clone() for p in made.run.model.parameters()]
    for step in made.run.steps(data(), batch_size=BATCH_SIZE, steps=1, shuffle=False):
        with step:
            for batch in step.shards:
                step.backward(slow_links.loss_of(made.run.model, batch))
        norms.append(step.gradient_norm)
    assert norms[0] > 1e-3
    kept = made.run.state["slow_link"].state_dict()
    for number in range(2):
        local = kept[f"parameters of group {number}"].values()
        change = [(a - b).norm() for a, b in zip(local, start, strict=True)]
        assert torch.stack(change).norm() == pytest.approx(1e-3 * slow_links.LR, rel=1e-2)


def test_a_round_that_is_not_over_is_told(capfd):
    train(DILOCO, steps=4)
    assert "steps from 3 on are not in the model yet" in capfd.readouterr().out
    train(DILOCO, steps=6)
    assert "not in the model" not in capfd.readouterr().out


def test_another_way_is_told_and_begins_with_nothing(tmp_path, capfd):
    train("bf16", steps=3, directory=tmp_path)
    made = trainer(None, directory=tmp_path)
    made.fit(data(), batch_size=BATCH_SIZE, steps=4, shuffle=False)
    assert "slow_link was 'Bf16Gradients(groups=2)' in the checkpoint" in capfd.readouterr().out
    assert "slow_link" not in made.run.state
    train("factors", steps=5, directory=tmp_path)
    assert "slow_link was None in the checkpoint" in capfd.readouterr().out


class Normed(torch.optim.SGD):
    """Has a `step` of its own."""

    def step(self, closure=None):
        return super().step(closure)


def normed():
    model = nn.Linear(40, 5)
    return unisono.Run(model, Normed(model.parameters()), shards=8, slow_link=DILOCO)


def two():
    models = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    optimizers = {name: torch.optim.SGD(m.parameters(), 0.1) for name, m in models.items()}
    return unisono.Run(models, optimizers, shards=8, slow_link=DILOCO)


def double():
    model = nn.Linear(40, 5).double()
    return unisono.Run(model, torch.optim.SGD(model.parameters()), shards=8, slow_link=DILOCO)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: trainer("bf16", shards=6), ValueError, "`shards` must be 2 × 2ʲ .*: pass .*=8"),
        (
            lambda: trainer(unisono.Bf16Gradients()),
            ValueError,
            r"all workers are on one: .* `slow_link=unisono.Bf16Gradients\(groups=2\)`",
        ),
        (lambda: trainer("bf16", closure=True), ValueError, "`closure` must be left out"),
        (lambda: trainer("bf16", audit_every=2), ValueError, "`audit_every` must be left out"),
        (lambda: trainer("bf16", devices=["cpu"] * 2), ValueError, "`devices` must be left"),
        (lambda: trainer("bf16", precision="fp16"), ValueError, "`grad_scaler` must be left"),
        (lambda: trainer("bf16", exchange="gloo"), ValueError, "but exchange is 'gloo'"),
        (
            lambda: trainer("bf16", on_gradients=lambda step, gradients: None),
            ValueError,
            "`on_gradients` must be left out",
        ),
        (normed, ValueError, "must have an element-wise optimizer .* but have Normed"),
        (two, ValueError, "must have one optimizer"),
        (double, ValueError, "must be float32 .* `weight` is torch.float64"),
        (lambda: trainer("bf-16"), TypeError, "`slow_link` must be an object of Bf16Gradients"),
        (lambda: trainer(unisono.DiLoCo), TypeError, "is `unisono.DiLoCo`: pass"),
        (lambda: unisono.Bf16Gradients(groups=1), ValueError, "`groups` must be at least 2"),
        (lambda: unisono.DiLoCo(local_steps=0), ValueError, "`local_steps` must be at least 1"),
        (lambda: unisono.DiLoCo(local_steps=2, outer_lr=0), ValueError, "`outer_lr` must be above"),
        (
            lambda: unisono.DiLoCo(local_steps=2, outer_momentum=1),
            ValueError,
            "`outer_momentum` must be at least 0 and below 1",
        ),
        (lambda: unisono.DiLoCo(local_steps=2, outer_lr="1"), TypeError, "must be a number"),
        (lambda: unisono.PowerSGD(rank=0), ValueError, "`rank` must be at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("link", LINKS)
def test_the_digest_is_the_same_on_any_number_of_workers(link):
    alone = train(link)
    for workers in (2, 3):
        assert unisono.launch(train, link, workers=workers) == [alone] * workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "faults"),
    [
        ("bf16", "kill:rank=1,step=3,at=updated; kill:rank=0,step=5,at=sums"),
        ("factors", "kill:rank=0,step=4,at=update; kill:rank=2,step=6,at=gradients"),
        ("local", "kill:rank=0,step=0,at=updated; kill:rank=1,step=5,at=updated"),
    ],
)
def test_a_worker_that_is_killed_costs_nothing(monkeypatch, link, faults):
    alone = train(link)
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(train, link, workers=3) == [alone] * 3
