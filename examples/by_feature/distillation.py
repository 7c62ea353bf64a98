"""Train a small student on what a teacher says: a frozen one, or (`--together`) one that learns."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def train_teacher(teacher, data):
    run = unisono.Run(teacher, torch.optim.Adam(teacher.parameters(), lr=2e-3), shards=4)
    for step in run.steps(data, batch_size=64, epochs=4):
        with step:
            for images, labels in step.shards:
                step.backward(F.cross_entropy(teacher(images), labels))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--together", action="store_true", help="the teacher learns, too")
    together = parser.parse_args().together
    torch.manual_seed(0)
    data = digits()
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)]
    teacher = nn.Sequential(nn.Flatten(), *layers)
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizers = {"student": torch.optim.SGD(student.parameters(), lr=0.5)}
    if together:
        optimizers["teacher"] = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    else:
        train_teacher(teacher, data)
        teacher.requires_grad_(False).eval()
    run = unisono.Run({"student": student, "teacher": teacher}, optimizers, shards=4)
    for step in run.steps(data, batch_size=64, epochs=8):
        with step:
            for batch in step.shards:
                step.backward(loss_of(student, teacher, batch, together))
    digest = run.digest()
    if unisono.world().rank == 0:
        images, labels = digits(train=False).tensors
        with torch.no_grad():
            accuracy = (student(images).argmax(1) == labels).float().mean()
        print(f"the student is right on {accuracy:.1%} of the test images, digest {digest}")


def loss_of(student, teacher, batch, together):
    images, labels = batch
    said = teacher(images)
    # What the student is told does not teach the teacher.
    loss = F.cross_entropy(student(images), (said.detach() / 2).softmax(dim=1))
    return loss + F.cross_entropy(said, labels) if together else loss


if __name__ == "__main__":
    main()
