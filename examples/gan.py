"""Train a GAN: a generator and a discriminator in one run, which update in turn.

python gan.py              # one worker
unisono run -n 2 gan.py    # two workers, the same digest
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

NOISE, EPOCHS = 16, 20


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
    )
    discriminator = nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2)),
        *(nn.Dropout(0.3), nn.Linear(128, 1)),
    )
    run = unisono.Run(
        {"generator": generator, "discriminator": discriminator},
        {
            "generator": torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            "discriminator": torch.optim.Adam(discriminator.parameters(), lr=1e-3),
        },
        shards=4,
        # directory="runs/gan", checkpoint="10min",  # stop at any time and resume
    )
    # A short last batch is left out: BatchNorm needs samples in every shard.
    for step in run.steps(digits(), batch_size=64, epochs=EPOCHS, drop_last=True):
        with step:
            with step.update("discriminator"):
                for real, _ in step.shards:
                    noise = torch.randn(len(real), NOISE, device=real.device)
                    wrong = F.softplus(discriminator(generator(noise).detach()))
                    step.backward((wrong + F.softplus(-discriminator(real))).mean())
            with step.update("generator"):
                for real, _ in step.shards:
                    noise = torch.randn(len(real), NOISE, device=real.device)
                    step.backward(F.softplus(-discriminator(generator(noise))).mean())
        # Every worker runs this loop. A step that a lost worker has undone comes again.
        if step.is_done and step.batch == 0 and unisono.world().rank == 0:
            told = ", ".join(f"{name} {mean:.3f}" for name, mean in step.means.items())
            print(f"epoch {step.epoch}: {told}")
    digest = run.digest()[:16]
    if unisono.world().rank == 0:
        print(f"{run.position.step} steps, digest {digest}")
        with torch.no_grad():
            noise = torch.randn(1, NOISE, device=next(generator.parameters()).device)
            (image,) = generator.eval()(noise)[0]
        print("\n".join("".join(" .+#"[min(3, int(4 * x))] * 2 for x in row) for row in image))


if __name__ == "__main__":
    main()
