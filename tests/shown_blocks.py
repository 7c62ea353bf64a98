"""What the documentation's blocks of Python take for granted, so that a test can run them all.

Blocks run in one process, each with names of its own: a small model, an optimizer, a data set.
"""

from __future__ import annotations

from collections.abc import Iterator

PAGES_THAT_RUN = ["start", "training", "data", "losses", "checkpoints", "callbacks"]
PAGES_THAT_RUN += ["programs", "models", "gpus", "split", "events", "exporting"]
# GPUs are the CPU here, which layers cannot be divided over by name: that block is left out.
HERE = {"cuda:0": "cpu", "cuda:1": "cpu", '"cuda"': '"cpu"', "[0, 1]": '["cpu"] * 2'}
LEFT_OUT = '{"cuda:0": ['

# Names of a program around them, small enough to train in no time.
AROUND = """
import itertools, os, sys, torch, torch.nn.functional as F, unisono
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.classification import MulticlassF1Score
from sklearn.metrics import accuracy_score
from unisono.callbacks import EMA, EarlyStopping
class SAM(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        closure()
        moved = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in moved]).norm()
        before = [p.clone() for p in moved]
        for p in moved:
            p.add_(p.grad * (0.05 / norm))
        loss = closure()
        for p, old in zip(moved, before):
            p.copy_(old)
        super().step()
        return loss
roc_auc_score = lambda targets, outputs: accuracy_score(targets, outputs.argmax(1))
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 10))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(20, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
class Towers(nn.Module):  # of images and texts
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 8), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(()))
    def forward(self, images, texts):
        return self.first(images), self.second(texts)
class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"image": torch.ones(20), "text": torch.ones(6), "label": index % 2}
criterion = nn.CrossEntropyLoss()
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
train_set = test_set = TensorDataset(torch.randn(96, 20), torch.arange(96) % 10)
loader = DataLoader(train_set, batch_size=32)
inputs = torch.randn(4, 20)
"""
FRESH = """
torch.manual_seed(0)
model = Net()
schedule = average = EMA(0.9)
optimizer = torch.optim.Adam(model.parameters())
trainer = unisono.Trainer(model, optimizer, loss)
"""
_TOWERS = """
model, images_and_texts = Towers(), TensorDataset(torch.randn(16, 20), torch.randn(16, 6))
optimizer = torch.optim.Adam(model.parameters())
"""
# How a block is run that needs more than that, by page and number; `exec(BLOCK)` is the block.
AS = {
    ("losses", 1): _TOWERS + "exec(BLOCK); trainer.fit(images_and_texts, batch_size=8, epochs=1)",
    ("losses", 2): _TOWERS
    + """
run = unisono.Run(model, optimizer, shards=2)
embed = lambda model, batch: model(*batch)
loss = lambda model, rows: F.mse_loss(model.scale * rows[0] @ rows[1].T, torch.eye(len(rows[0])))
for step in run.steps(images_and_texts, batch_size=8, steps=1):
    exec(BLOCK)
""",
    ("models", 0): """
generator, discriminator = nn.Linear(100, 8), nn.Linear(8, 1)
optimizer_g = torch.optim.Adam(generator.parameters())
optimizer_d = torch.optim.Adam(discriminator.parameters())
schedule_g = CosineAnnealingLR(optimizer_g, 9)
generator_loss = lambda fake: -fake.mean()
discriminator_loss = lambda real, fake: fake.mean() - real.mean()
dataset = TensorDataset(torch.randn(16, 8))
exec(BLOCK)
""",
    ("programs", 3): "exec(BLOCK); trainer.fit(train_set, batch_size=32, epochs=1)",
    ("losses", 4): """
exec(BLOCK)
inputs, labels = zip(*train_set)
rows = TensorDataset(torch.stack(inputs), torch.tensor(labels), torch.arange(len(labels)))
trainer.fit(rows, batch_size=32, epochs=1)
assert not bool((priorities.weights == 1).any())
""",
    ("training", 5): """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(26, 2)
    def forward(self, image, text):
        return self.layer(torch.cat([image, text], 1))
model, data, auc = Both(), Pairs(), roc_auc_score
loss = lambda model, batch: F.cross_entropy(model(batch["image"], batch["text"]), batch["label"])
auc = lambda outputs, targets: roc_auc_score(targets, outputs)
trainer = unisono.Trainer(model, torch.optim.Adam(model.parameters()), loss)
exec(BLOCK)
""",
    ("exporting", 1): "exec(BLOCK); assert torch.equal(outputs, model.eval()(inputs))",
    ("exporting", 2): """
import importlib.util
if importlib.util.find_spec("onnxscript"):
    exec(BLOCK)
""",
    # It reads what a block of another page has written.
    ("events", 0): 'os.symlink("checkpoints0nist", "runs/events0nist"); exec(BLOCK); losses[0]',
}


def program_of(page: str, shown: list[str]) -> Iterator[str]:
    """Give lines that run the blocks of a page, each with fresh names."""
    for number, block in enumerate(shown):
        if LEFT_OUT in block:
            continue
        # One line reads files that are not here.
        code = "\n".join(line for line in block.splitlines() if "mnist(" not in line)
        code = code.replace('"runs/m', f'"runs/{page}{number}')
        for gpu, here in HERE.items():
            code = code.replace(gpu, here)
        around = FRESH + AS.get((page, number), "exec(BLOCK)")
        yield f"exec({around!r}, dict(globals(), BLOCK={code!r}))"
