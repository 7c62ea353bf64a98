"""Lightning with DDP: values of every kind are logged with ``sync_dist``; logs go to a folder."""

import hashlib
import os
import sys

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("loss", loss, sync_dist=True)
        self.log("samples", torch.tensor(len(x)), sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        outputs = self.network(x)
        right = (outputs.argmax(1) == y).sum()
        self.log("mean right", right, sync_dist=True, on_epoch=True)
        self.log("right", right, sync_dist=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", x.max(), sync_dist=True, reduce_fx="max")
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


lightning.seed_everything(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(128, 16, generator=generator)
data = TensorDataset(x, x[:, :4].argmax(1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[1],
)
module = Module()
trainer.fit(module, DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
bits = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
digest = hashlib.sha256(bits).hexdigest()
print("rank", dist.get_rank(), "of", dist.get_backend(), logged, digest)
