"""Programs that carry hidden state from batch to batch, and loops of one process beside them."""

import torch
import torch.nn.functional as F
from tests.train.closures import SAM
from torch import nn
from torch.utils.data import DataLoader, Subset

import unisono
from unisono.data import continuing_rows

BATCH_SIZE, STEPS, WINDOW = 8, 10, 5  # six steps an epoch


class Recurrent(nn.Module):
    """An LSTM whose state has rows first, as PyTorch's own has not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 11)

    def forward(self, tokens, state=None):
        if state is not None:
            state = tuple(part.transpose(0, 1).contiguous() for part in state)
        outputs, state = self.lstm(self.embed(tokens), state)
        return self.head(outputs), tuple(part.transpose(0, 1) for part in state)


class Memory(nn.Module):
    """Attention over what was seen before, of which there is more in each batch, up to a limit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens, state=None):
        inputs = self.embed(tokens)
        seen = inputs if state is None else torch.cat([state["memory"], inputs], 1)
        outputs, _ = self.attend(inputs, seen, seen)
        # A view of what has a graph, as Transformer-XL's is before it is detached.
        return self.head(inputs + outputs), {"memory": seen[:, -12:], "length": seen.shape[1]}


MODELS = {"recurrent": Recurrent, "memory": Memory}
OPTIMIZERS = {
    "adam": (lambda p: torch.optim.Adam(p, lr=0.01), None),
    "sam": (lambda p: SAM(p, lr=0.1), True),
}


def loss_of(model, batch, state):
    inputs, targets = batch
    logits, state = model(inputs, state)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), state


def data(rows=BATCH_SIZE, batches=6):
    tokens = torch.arange(rows * batches * WINDOW + 1) ** 2 % 11
    starts = range(0, len(tokens) - WINDOW, WINDOW)
    windows = [(tokens[at : at + WINDOW], tokens[at + 1 : at + 1 + WINDOW]) for at in starts]
    return Subset(windows, continuing_rows(len(windows), rows))


def made(model, optimizer="adam"):
    torch.manual_seed(3)
    built = MODELS[model]()
    make, closure = OPTIMIZERS[optimizer]
    return built, make(built.parameters()), closure


def detached(state):
    if isinstance(state, dict):
        return state | {"memory": state["memory"].detach()}
    return tuple(part.detach() for part in state)


def in_one_process(name, optimizer="adam", steps=STEPS):
    """Train as people write it; gives the model."""
    model, optimizer, closure = made(name, optimizer)
    step = 0
    while step < steps:
        state = None
        for batch in DataLoader(data(), batch_size=BATCH_SIZE):
            kept = []

            def evaluate(batch=batch, state=state, kept=kept):
                optimizer.zero_grad()
                loss, following = loss_of(model, batch, state)
                loss.backward()
                kept[:] = [detached(following)]
                return loss

            if closure is None:
                evaluate()
                optimizer.step()
            else:
                optimizer.step(evaluate)
            (state,), step = kept, step + 1
            if step == steps:
                break
    return model


def trainer(name, shards=4, optimizer="adam", loss=loss_of, **options):
    model, made_optimizer, closure = made(name, optimizer)
    return unisono.Trainer(
        model, made_optimizer, loss, shards=shards, carry=True, closure=closure, **options
    )


def train(name="recurrent", shards=4, steps=STEPS, fit=None, **options):
    """Train; gives the digest, and what an evaluation finds."""
    made_trainer = trainer(name, shards, **options)
    made_trainer.fit(data(), batch_size=BATCH_SIZE, steps=steps, shuffle=False, **(fit or {}))
    found = made_trainer.evaluate(data(batches=3), batch_size=BATCH_SIZE)
    return made_trainer.digest(), found["loss"]
