"""Train a small model on every worker; say what it has come to, and how long steps have taken."""

import argparse
import os
import time

import torch
from tests.hosts.programs.models import Cnn, Gpt, Normed
from torch import nn

import unisono
from unisono.state.digest import digest_of

WAYS = {
    "bf16": unisono.Bf16Gradients(groups=2),
    "factors": unisono.PowerSGD(rank=2, start_step=2, groups=2),
    "local": unisono.DiLoCo(local_steps=3, groups=2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("cnn", "gpt"))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--slow", type=int, help="a rank whose forward passes take longer")
    parser.add_argument("--directory")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--slow-link", choices=WAYS)
    parser.add_argument("--audit-every", type=int)
    parser.add_argument("--optimizer", choices=("adamw", "normed"), default="adamw")
    parser.add_argument("--fails-once", help="a file: rank 3 ends before all else, and makes it")
    given = parser.parse_args()
    if given.fails_once and os.environ["RANK"] == "3" and not os.path.exists(given.fails_once):
        open(given.fails_once, "w").close()
        raise SystemExit(1)
    torch.manual_seed(0)
    model = Cnn() if given.model == "cnn" else Gpt(given.width)
    optimizer = {"adamw": torch.optim.AdamW, "normed": Normed}[given.optimizer](
        model.parameters(), lr=1e-2
    )
    every = {"checkpoint_every": 2} if given.directory else {}
    run = unisono.Run(
        model,
        optimizer,
        shards=given.shards,
        clip_norm=5.0,
        exchange=given.exchange,
        slow_link=WAYS.get(given.slow_link),
        audit_every=given.audit_every,
        directory=given.directory,
        **every,
    )
    begun_s = time.monotonic()
    for step in run.steps(model.data(seed=0), batch_size=32, steps=given.steps):
        with step:
            for inputs, targets in step.shards:
                time.sleep(0.02 * (run.world.rank == given.slow))
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
        time.sleep(given.pause)
        print(f"rank {run.world.rank} step {run.position.step}", flush=True)
    took_s = time.monotonic() - begun_s
    print(
        f"rank {run.world.rank} digest {digest_of(model, optimizer)} in {took_s:.3f} s", flush=True
    )


main()
