"""Distil a large teacher into a small student, which learns what the teacher says of each class.

python distillation.py              # one worker
unisono run -n 2 distillation.py    # two workers, the same digests
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

TEMPERATURE, EPOCHS = 3.0, 8


def accuracy(model, batch):
    images, labels = batch
    logits = model(images)
    hits = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": hits}


def distil(student, teacher, batch):
    images, labels = batch
    said, logits = teacher(images), student(images)
    soft = F.kl_div(
        (logits / TEMPERATURE).log_softmax(1),
        (said / TEMPERATURE).softmax(1),
        reduction="batchmean",
    )
    return {
        "loss": 0.9 * TEMPERATURE**2 * soft + 0.1 * F.cross_entropy(logits, labels),
        "agreement": (logits.argmax(1) == said.argmax(1)).float().mean(),
    }


def main():
    torch.manual_seed(0)
    teacher = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
    )
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-3)
    trainer = unisono.Trainer(teacher, optimizer, accuracy, shards=4)
    trainer.fit(digits(), batch_size=64, epochs=5, validate=digits(train=False))

    teacher.requires_grad_(False).eval()  # a model without an optimizer must be frozen
    run = unisono.Run(
        {"student": student, "teacher": teacher},
        {"student": torch.optim.Adam(student.parameters(), lr=1e-2)},
        shards=4,
    )
    for step in run.steps(digits(), batch_size=64, epochs=EPOCHS):
        with step:
            for batch in step.shards:
                step.backward(distil(student, teacher, batch))
        if step.is_done and step.batch == 0 and unisono.world().rank == 0:
            print(f"epoch {step.epoch}: {dict(step.means)}")
    digest = run.digest()[:16]
    if unisono.world().rank == 0:
        images, labels = (tensor.to(run.device.torch) for tensor in digits(train=False).tensors)
        with torch.no_grad():
            right = (student.eval()(images).argmax(1) == labels).float().mean()
        print(f"the student is right on {right:.2%} of the test images, digest {digest}")


if __name__ == "__main__":
    main()
