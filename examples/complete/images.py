"""Train a ResNet on images: augmentation, validation, schedule, best checkpoint, resume.

    python examples/complete/images.py
    unisono run -n 2 examples/complete/images.py --data mnist --directory runs/mnist

Without `--data` it takes the 1,797 digits that are part of Unisono, and gets
98 % of the test images right. `--data` is a folder with MNIST's files, or of data sets of its
shape; `--download` fetches them. Stop it with Ctrl-C, start it again, and it continues.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import unisono
from unisono.callbacks import BestCheckpoint
from unisono.data import digits, mnist


class Augmented(Dataset):
    """Shifts an image by some pixels and erases a square of it, differently in each epoch.

    Generators are seeded before each sample, so it does not matter which process draws.
    """

    def __init__(self, dataset, shift):
        self.dataset, self.shift = dataset, shift

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        side = image.shape[-1]
        top, left = torch.randint(0, 2 * self.shift + 1, (2,)).tolist()
        image = F.pad(image, [self.shift] * 4)[:, top : top + side, left : left + side].clone()
        top, left = torch.randint(0, side, (2,)).tolist()
        image[:, top : top + side // 4, left : left + side // 4] = 0
        return image, label


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.Conv2d(num_out, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.shortcut = nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.inner(x))


class ResNet(nn.Sequential):
    """Images (batch, 1, side, side) → logits of ten classes."""

    def __init__(self, width=16):
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    return {
        "loss": F.cross_entropy(logits, labels, label_smoothing=0.1),
        "accuracy": (logits.argmax(1) == labels).float().mean(),
    }


def datasets(args):
    if args.data is None:
        train_set, test_set, shift = digits(), digits(train=False), 1
    else:
        train_set = mnist(args.data, download=args.download)
        test_set, shift = mnist(args.data, train=False), 2
    if args.quick:
        train_set, test_set = Subset(train_set, range(256)), Subset(test_set, range(100))
    return Augmented(train_set, shift), test_set


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", metavar="FOLDER", help="MNIST's files; without it: digits")
    parser.add_argument("--download", action="store_true", help="fetch the files that are missing")
    parser.add_argument("--directory", default="runs/images", help="checkpoints (%(default)s)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--shards", type=int, default=4, help="at least the number of workers")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that read ahead")
    parser.add_argument("--quick", action="store_true", help="two epochs of 256 images")
    args = parser.parse_args()
    if args.quick:
        args.epochs = 2
    return args


def main():
    args = arguments()
    train_set, test_set = datasets(args)
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    num_steps = args.epochs * math.ceil(len(train_set) / args.batch_size)
    best = BestCheckpoint(monitor="accuracy", better="higher")
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, num_steps)
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=args.shards,
        seed=0,
        directory=args.directory,
        checkpoint="1 epoch",
        schedule=unisono.Schedule(rates, every="step"),
        callbacks=[best],
    )
    loader = DataLoader(train_set, args.batch_size, shuffle=True, num_workers=args.loader_workers)
    trainer.fit(loader, epochs=args.epochs, validate=test_set)
    if unisono.world().rank == 0:
        print(f"best accuracy {best.best:.2%}, after step {best.step}")

    unisono.load_weights(f"{args.directory}/best.safetensors", model)
    guesses = trainer.predict(test_set, batch_size=256).argmax(1)  # row i is of image i
    labels = torch.tensor([label for _, label in test_set])
    if unisono.world().rank == 0:
        wrong = (guesses != labels).nonzero().flatten().tolist()
        print(f"these weights are wrong on {len(wrong)} of {len(labels)} test images")
        for index in wrong[:5]:
            print(f"  image {index} shows a {labels[index]} and is taken for a {guesses[index]}")


if __name__ == "__main__":
    main()
