"""Train an actor and a critic on recorded moves: one loss, two optimizers, each clipped alone.

A state is a place on a line, a move is one step to the left or to the right, and the reward is how
much nearer to 0 it leads. Advantages come from the critic.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unisono


def recorded(count):
    """Make states, random moves in them, and the rewards of these."""
    states = torch.rand(count, 1) * 4 - 2
    moves = torch.randint(0, 2, (count,))
    after = states[:, 0] + (2 * moves - 1) * 0.5
    return TensorDataset(states, moves, states[:, 0].abs() - after.abs())


def mlp(outputs):
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, outputs))


def main():
    torch.manual_seed(0)
    data = recorded(2048)
    actor, critic = mlp(2), mlp(1)
    run = unisono.Run(
        {"actor": actor, "critic": critic},
        {
            "actor": torch.optim.Adam(actor.parameters(), lr=5e-3),
            "critic": torch.optim.SGD(critic.parameters(), lr=0.05, momentum=0.9),
        },
        shards=4,
        clip_norm={"actor": 0.5, "critic": 1.0},
    )
    for step in run.steps(data, batch_size=128, epochs=10):
        with step:  # one loss for both
            for states, moves, rewards in step.shards:
                advantages = rewards - critic(states).squeeze(1)
                chosen = F.log_softmax(actor(states), dim=1).gather(1, moves[:, None]).squeeze(1)
                policy = -(advantages.detach() * chosen).mean()
                value = advantages.square().mean()
                step.backward({"loss": policy + 0.5 * value, "value": value})
    digest = run.digest()
    if unisono.world().rank == 0:
        with torch.no_grad():
            states = torch.linspace(-2, 2, 9)[:, None]
            moves = 2 * actor(states).argmax(1) - 1
        print("moves from -2 to 2:", *moves.tolist())
        print(f"{run.position.step} steps, digest {digest}")


if __name__ == "__main__":
    main()
