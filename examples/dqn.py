"""Learn to balance a pole by reinforcement learning: DQN with a replay memory, a target network.

Between steps every worker makes the same moves; they share the learning. The memory and the games
are buffers of a module, so they are kept with the run, and in replacements of lost workers.

python dqn.py              # one worker
unisono run -n 2 dqn.py    # two workers, the same digest
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import unisono

GAMES, SIZE, STEPS = 16, 16_384, 1_500


class Memory(nn.Module):
    """The last SIZE moves (state, move, next state, has fallen) in GAMES games under way."""

    def __init__(self):
        super().__init__()
        self.register_buffer("moves", torch.zeros(SIZE, 10))
        self.register_buffer("state", torch.zeros(GAMES, 4))  # position, angle, and their speeds
        self.register_buffer("age", torch.zeros(GAMES))

    @torch.no_grad()
    def play(self, q, number, random_share):
        """Make one move in each game; return for how many moves the poles stand."""
        drawn = torch.randint_like(self.age, 2)
        move = torch.where(torch.rand_like(self.age) < random_share, drawn, q(self.state).argmax(1))
        after = after_move(self.state, move)
        fell = (after[:, :2].abs() > after.new_tensor([2.4, 0.21])).any(1, keepdim=True)
        first = number * GAMES % SIZE
        self.moves[first : first + GAMES] = torch.cat([self.state, move[:, None], after, fell], 1)
        self.age = torch.where(fell[:, 0], 0, self.age + 1)
        self.state = torch.where(fell, 0.02 * torch.randn_like(after), after)
        return self.age.mean()


def after_move(state, move):
    """Push the cart to the left or the right for 0.02 s (Barto, Sutton and Anderson 1983)."""
    _, angle, speed, turn = state.T
    pull = (20 * move - 10 + 0.05 * turn**2 * angle.sin()) / 1.1
    tilt = (9.8 * angle.sin() - angle.cos() * pull) / (2 / 3 - 0.05 * angle.cos() ** 2 / 1.1)
    return state + 0.02 * torch.stack([speed, turn, pull - tilt * angle.cos() / 22, tilt], 1)


def main():
    torch.manual_seed(0)
    q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    target, memory = copy.deepcopy(q).requires_grad_(False), Memory()
    memory.play(q, 0, random_share=1)
    models = {"q": q, "target": target, "memory": memory}
    run = unisono.Run(models, {"q": torch.optim.Adam(q.parameters(), lr=1e-3)}, shards=4)
    # Each step learns from 256 moves, which the shards draw from the memory.
    for step in run.steps(range(256), batch_size=256, steps=STEPS):
        with step:
            for rows in step.shards:
                chosen = torch.randint(min((step.number + 1) * GAMES, SIZE), (len(rows),))
                state, move, after, fell = memory.moves[chosen].split((4, 1, 4, 1), 1)
                wanted = (1 - fell) * (1 + 0.98 * target(after).amax(1, keepdim=True))
                step.backward(F.smooth_l1_loss(q(state).gather(1, move.long()), wanted))
        if step.is_done:  # else a worker was lost in the update, and the step comes again
            stand = memory.play(q, step.number + 1, random_share=max(0.05, 1 - step.number / 500))
            if step.number % 50 == 0:
                target.load_state_dict(q.state_dict())
            if step.number % 250 == 249 and unisono.world().rank == 0:
                print(f"step {step.number}: poles stand for {stand:.0f} moves")
    digest = run.digest()[:16]
    if unisono.world().rank == 0:
        print(f"{run.position.step} steps, digest {digest}")


if __name__ == "__main__":
    main()
