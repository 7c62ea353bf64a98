"""Small datasets, read from the files in which they are published.

::

    from unisono.data import digits, mnist

    small_set = digits()  # part of the package
    train_set, test_set = mnist("data/mnist"), mnist("data/mnist", train=False)
"""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from unisono.errors import DataFormatError


def mnist(folder: str | os.PathLike[str], train: bool = True) -> TensorDataset:
    """Read MNIST, or a dataset in its format (Fashion-MNIST, KMNIST), from its two IDX files.

    Args:
        folder: where the files are, under their usual names, with or without ``.gz``.
        train: True: the 60,000 training samples; False: the 10,000 test samples.

    Returns:
        Pairs of an image, float32 (1, 28, 28) in [0, 1], and its label, int64 in 0 … 9.

    Raises:
        FileNotFoundError: a file is missing; the message names the folder and the file.
        DataFormatError: a file is damaged, not of MNIST's shape, or the two do not match.
    """
    folder, prefix = Path(folder).expanduser(), "train" if train else "t10k"
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    images_path, labels_path = (_find(folder, name) for name in names)
    images, labels = _read_idx(images_path), _read_idx(labels_path)
    if (
        images.shape != (len(labels), 28, 28)
        or labels.shape != (len(labels),)
        or int(labels.max()) > 9
    ):
        raise DataFormatError(
            f"images must be of shape (n, 28, 28) and labels of (n,), 0 … 9, but {images_path} has "
            f"{tuple(images.shape)} and {labels_path} {tuple(labels.shape)} up to "
            f"{int(labels.max())}: take both from the same dataset in MNIST's format."
        )
    pixels = images.unsqueeze(1).to(torch.float32).div_(255)
    return TensorDataset(pixels, labels.to(torch.int64))


def digits(train: bool = True) -> TensorDataset:
    """Read 1,797 handwritten digits that are part of the package, for examples and tests.

    They are scikit-learn's: the test images of *Optical Recognition of Handwritten Digits* by
    E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, CC BY 4.0).

    Args:
        train: True: the 1,437 training samples; False: the 360 test samples, which are every fifth.

    Returns:
        Pairs of an image, float32 (1, 8, 8) in [0, 1], and its label, int64 in 0 … 9.
    """
    folder = Path(__file__).with_name("digits")
    images, labels = (
        _read_idx(folder / f"{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1")
    )
    chosen = (torch.arange(len(images)) % 5 == 0) != train
    pixels = images[chosen].unsqueeze(1).to(torch.float32).div_(16)
    return TensorDataset(pixels, labels[chosen].to(torch.int64))


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    state = "has neither" if folder.is_dir() else "is not a folder"
    raise FileNotFoundError(
        f"The folder must hold {name} or {name}.gz, but {folder} {state}: "
        f"pass the folder that has them; `torchvision.datasets.MNIST` downloads them."
    )


def _read_idx(path: Path) -> torch.Tensor:
    """Read the unsigned bytes of an IDX file, which is gzipped if its name says so.

    It begins with 0, 0, 8 and the number of dimensions, then the size of each in four bytes,
    big-endian.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it begins with {content[:3].hex(' ')} instead of 00 00 08")
        begin = 4 + 4 * content[3]
        shape = np.frombuffer(content[4:begin], ">u4")
        values = np.frombuffer(content, "u1", offset=begin).reshape(shape)
        if not values.size:
            raise ValueError("it has no values")
        return torch.from_numpy(values.copy())
    except (gzip.BadGzipFile, EOFError, zlib.error, IndexError, ValueError) as error:
        raise DataFormatError(
            f"{path} must be a whole IDX file of bytes, but “{error}”: copy or download it again."
        ) from error
