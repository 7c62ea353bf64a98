"""Train a small model on every worker; say what it has come to, and how long steps have taken."""

import argparse
import itertools
import os
import time

import torch
from tests.chaos.exchanges import install
from tests.device.ranks import Normed
from tests.hosts.programs import killing
from tests.hosts.programs.models import Cnn, Gpt
from tests.train.closures import SAM
from torch import nn

import unisono
from unisono.engine.state.contents import digest_of

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "normed": lambda parameters: Normed(parameters, lr=1e-2),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "sam": lambda parameters: SAM(parameters, lr=0.05, momentum=0.9),
}


def add_noise(step, gradients):
    """See gradients between their sum and the update, and draw random numbers there."""
    for gradient in gradients.values():
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("cnn", "gpt"))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--leave", type=int, help="a first loop after so many steps")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--directory")
    parser.add_argument("--every", type=int, default=2, help="steps from checkpoint to checkpoint")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--noise", action="store_true", help="in a function of the gradients")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--split", type=int, default=1, help="over so many devices")
    parser.add_argument("--fails-once", help="a file: rank 3 ends before all else, and makes it")
    parser.add_argument("--raises", type=int, help="a rank that fails in step 3")
    parser.add_argument("--exits", type=int, help="a rank that exits there")
    given = parser.parse_args()
    os.environ["UNISONO_EXCHANGE"] = given.exchange
    killing.install()
    if given.fails_once and os.environ["RANK"] == "3" and not os.path.exists(given.fails_once):
        open(given.fails_once, "w").close()
        raise SystemExit(1)
    install(given.device)
    torch.manual_seed(0)
    model = Cnn() if given.model == "cnn" else Gpt(given.width)
    optimizer = OPTIMIZERS[given.optimizer](model.parameters())
    every = {"checkpoint": given.every} if given.directory else {}
    where = {"device": given.device}
    if given.split > 1:
        where = {}
        unisono.split(model, [given.device] * given.split)
    run = unisono.Run(
        model,
        optimizer,
        shards=given.shards,
        clip_norm=5.0,
        on_gradients=add_noise if given.noise else None,
        **where,
        directory=given.directory,
        **every,
    )

    def loss(batch):
        inputs, targets = batch
        outputs = model(inputs)
        return nn.functional.cross_entropy(outputs, targets.to(outputs.device))

    begun_s = time.monotonic()
    for num_steps in (None,) if given.leave is None else (given.leave, None):
        loop = run.steps(model.data(seed=0), batch_size=32, steps=given.steps)
        for step in itertools.islice(loop, num_steps):
            with step:
                step.again(loss)
                for batch in step.shards:
                    step.backward(loss(batch))
            if unisono.world().rank == given.raises and run.position.step == 3:
                raise RuntimeError("bad luck")
            if unisono.world().rank == given.exits and run.position.step == 3:
                os._exit(0)
            time.sleep(given.pause)
            print(f"rank {unisono.world().rank} step {run.position.step}\n", end="", flush=True)
        loop.close()
    took_s = time.monotonic() - begun_s
    print(
        f"rank {unisono.world().rank} digest {digest_of(model, optimizer)} in {took_s:.3f} s\n",
        end="",  # torchrun's `python -u` writes it by itself, after what others write meanwhile
        flush=True,
    )


main()
