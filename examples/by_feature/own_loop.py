"""Write the training loop yourself: `Run` gives out the batches, and the `with` block updates."""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


class Average:
    """A moving average of the loss, which is kept with the run: in replacements, checkpoints."""

    value = 0.0

    def add(self, loss):
        self.value = 0.9 * self.value + 0.1 * loss if self.value else loss

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
    run = unisono.Run(model, optimizer, shards=4, seed=0, clip_norm=1.0)
    run.state["schedule"] = schedule
    run.state["average"] = average = Average()

    for step in run.steps(digits(), batch_size=64, epochs=5):
        with step:
            for images, labels in step.shards:  # those that this worker computes
                logits = model(images)
                hits = (logits.argmax(1) == labels).float().mean()
                step.backward({"loss": F.cross_entropy(logits, labels), "accuracy": hits})
        if not step.is_done:  # a worker was lost in the update, and the step comes again
            continue
        schedule.step()
        average.add(step.loss)
        if unisono.world().rank == 0 and step.number % 40 == 0:
            print(f"step {step.number}: {dict(step.means)}, average loss {average.value:.4f}")

    digest = run.digest()  # collective: every worker asks for it
    if unisono.world().rank == 0:
        print(f"{run.position.step} steps, digest {digest}")


if __name__ == "__main__":
    main()
