"""What Accelerate and Lightning count on several ranks: 101 samples, and tokens that padding hides.

The first part trains as docs/problems/padding.md does: 4 tokens of 40 are ones.
"""

import os

import lightning
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
SEQUENCES = [torch.ones(1).long(), torch.zeros(9).long()] * 4
SAMPLES = DataLoader(TensorDataset(torch.arange(101)), batch_size=16)


def pad(sequences):
    return pad_sequence(sequences, True, padding_value=-100)


class Counts(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def validation_step(self, batch, _):
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)


accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Embedding(1, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(SEQUENCES, 8 // WORLD_SIZE, shuffle=True, collate_fn=pad)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(100):
    for targets in loader:
        logits = model(torch.zeros_like(targets)).transpose(1, 2)
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(logits, targets))
        optimizer.step()
ones = accelerator.unwrap_model(model).weight.softmax(1)[0, 1]
accelerator.print(f"Accelerate: ones {ones:.1%}")
gathered = for_metrics = 0
for (rows,) in accelerator.prepare(SAMPLES):
    gathered += len(accelerator.gather(rows))
    for_metrics += len(accelerator.gather_for_metrics(rows))
accelerator.print(f"Accelerate: gather {gathered}, gather_for_metrics {for_metrics}")
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
(result,) = trainer.validate(Counts(), SAMPLES, verbose=False)
accelerator.print(f"Lightning: {result['samples']:.0f}")
