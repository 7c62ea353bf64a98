"""Train a generator and a discriminator in one run: `step.update` says which optimizer steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset

import unisono
from unisono.data import digits

NOISE = 16


def build():
    layers = [nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)]
    generator = nn.Sequential(*layers, nn.Sigmoid())
    discriminator = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
    )
    return generator, discriminator


def main():
    torch.manual_seed(0)
    data = Subset(digits(), range(1408))  # so that every shard has samples for BatchNorm
    generator, discriminator = build()
    run = unisono.Run(
        {"generator": generator, "discriminator": discriminator},
        {
            "generator": torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            "discriminator": torch.optim.Adam(discriminator.parameters(), lr=1e-3),
        },
        shards=4,
    )
    for step in run.steps(data, batch_size=64, epochs=5):
        with step:
            with step.update("discriminator"):
                for real, _ in step.shards:
                    made_up = generator(torch.randn(len(real), NOISE)).detach()
                    wrong = F.softplus(-discriminator(real)) + F.softplus(discriminator(made_up))
                    step.backward(wrong.mean())
            with step.update("generator"):
                for real, _ in step.shards:
                    made_up = generator(torch.randn(len(real), NOISE))
                    step.backward(F.softplus(-discriminator(made_up)).mean())
        if step.is_done and step.batch == 0 and unisono.world().rank == 0:
            told = ", ".join(f"{name} {mean:.3f}" for name, mean in step.means.items())
            print(f"epoch {step.epoch}: {told}")
    digest = run.digest()
    if unisono.world().rank == 0:
        print(f"{run.position.step} steps, digest {digest}")


if __name__ == "__main__":
    main()
