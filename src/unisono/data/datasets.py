"""Small data sets, read from the files in which they are published.

::

    from unisono.data import digits, mnist

    small_set = digits()  # part of the package
    train_set = mnist("data/mnist", download=True)
    test_set = mnist("data/mnist", train=False, download=True)

Every worker calls them; whichever comes first downloads what is missing, the others wait for it.

Download the files of a data set into a folder, once per host, with pooch.

Pooch gives a file its name once its checksum is right; what comes is never unpickled. The kernel's
lock on a file in the folder has one process download while others wait, and ends with that process.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from unisono.errors import DataFormatError, DownloadError
from unisono.runtime.plainfile import open_plain


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set's files come from.

    Args:
        address: of the folder that has them.
        files: the checksum of each, by file name.
    """

    address: str
    files: Mapping[str, str]


MNIST = Source(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte.gz": (
            "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"
        ),
        "train-labels-idx1-ubyte.gz": (
            "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"
        ),
        "t10k-images-idx3-ubyte.gz": (
            "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"
        ),
        "t10k-labels-idx1-ubyte.gz": (
            "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"
        ),
    },
)
# Its makers publish MD5 sums and no others.
FASHION_MNIST = Source(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    {
        "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
)


def mnist(
    folder: str | os.PathLike[str], train: bool = True, download: bool = False
) -> TensorDataset:
    """Read MNIST, or a data set of its shape (KMNIST), from its two IDX files.

    Args:
        folder: where the files lie under their usual names, with or without ``.gz``.
        train: the 60,000 samples to train on, else the 10,000 to test with.
        download: fetch what is missing, which needs ``unisono[download]``; packed files that are
            there must be MNIST's own. When several workers call it at once, one of them fetches.

    Returns:
        Pairs of an image, float32 (1, 28, 28) in [0, 1], and its label, int64 in 0 … 9.

    Raises:
        FileNotFoundError: a file is missing; the message names the folder and what was looked for.
        DataFormatError: a file is damaged, not of MNIST's shape, or the two do not belong together.
        DownloadError: a file does not come with its checksum, or the folder cannot be written.
        ModuleNotFoundError: `download` needs a package that is not installed.
    """
    return _read_pairs(Path(folder).expanduser(), train, download, MNIST)


def fashion_mnist(
    folder: str | os.PathLike[str], train: bool = True, download: bool = False
) -> TensorDataset:
    """Read Fashion-MNIST, from a folder of its own; everything else is as for :func:`mnist`."""
    return _read_pairs(Path(folder).expanduser(), train, download, FASHION_MNIST)


def digits(train: bool = True) -> TensorDataset:
    """Read 1,797 handwritten digits, which are part of the package: for examples and tests.

    They are scikit-learn's: the test images of *Optical Recognition of Handwritten Digits* by
    E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, CC BY 4.0).

    Args:
        train: the 1,437 samples to train on, else the 360 to test with, which are every fifth.

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


def _read_pairs(folder: Path, train: bool, download: bool, source: Source) -> TensorDataset:
    prefix = "train" if train else "t10k"
    names = (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    if download:
        files = {f"{name}.gz": source.files[f"{name}.gz"] for name in names}
        fetch_missing(folder, files, source.address)
    images_path, labels_path = (_find(folder, name) for name in names)
    images, labels = _read_idx(images_path), _read_idx(labels_path)
    _check(images, images_path, labels, labels_path)
    pixels = images.unsqueeze(1).to(torch.float32).div_(255)
    return TensorDataset(pixels, labels.to(torch.int64))


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    state = "has neither" if folder.is_dir() else "is not a folder"
    raise FileNotFoundError(
        f"The folder must hold {name} or {name}.gz, but {folder} {state}: "
        f"pass `download=True`, or the folder that has them."
    )


def _read_idx(path: Path) -> torch.Tensor:
    """Read the unsigned bytes of an IDX file, packed with gzip if its name says so.

    It begins with 0, 0, 8 and the number of dimensions, then the size of each in four bytes, with
    the highest first.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        if content[:3] != b"\0\0\x08":
            raise ValueError(f"it begins with {content[:4].hex(' ')}, as none of bytes does")
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


def _check(
    images: torch.Tensor, images_path: Path, labels: torch.Tensor, labels_path: Path
) -> None:
    if images.shape[1:] != (28, 28):
        raise DataFormatError(
            f"{images_path}: the images must be of shape (n, 28, 28), but are of "
            f"{tuple(images.shape)}: check that this is MNIST's file."
        )
    if labels.dim() != 1 or int(labels.max()) > 9:
        raise DataFormatError(
            f"{labels_path}: the labels must be of shape (n,), 0 … 9, but are of "
            f"{tuple(labels.shape)} up to {labels.max().item()}: check that this is MNIST's file."
        )
    if len(images) != len(labels):
        raise DataFormatError(
            f"Images and labels must be equally many, but {images_path} has {len(images):,} and "
            f"{labels_path} has {len(labels):,}: take both from the same data set."
        )


_TIMEOUT_S = 30.0  # for a server's next bytes


def fetch_missing(folder: Path, files: Mapping[str, str], address: str) -> None:
    """Download the files that are not in a folder, packed or not; make the folder if need be.

    Args:
        folder: where to.
        files: the checksum of each, such as ``sha256:…``, by file name.
        address: of the folder that has them.

    Raises:
        ModuleNotFoundError: something is missing, and so is pooch.
        DownloadError: a file does not come with its checksum, or the folder cannot be written, or
            has a file with another.
    """
    if all(_is_there(folder, name, checksum) for name, checksum in files.items()):
        return
    try:
        import pooch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`download=True` needs the package {error.name}, which is not installed: run "
            f"`pip install 'unisono[download]'`, or put {', '.join(files)} into {folder} yourself.",
            name=error.name,
        ) from error
    # A server may pack what it sends once more, and requests unpack it.
    headers = {"Accept-Encoding": "identity"}
    downloader = pooch.HTTPDownloader(timeout=_TIMEOUT_S, headers=headers)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_fd = open_plain(folder / ".download.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
            for name, checksum in files.items():
                if not _is_there(folder, name, checksum):
                    pooch.retrieve(address + name, checksum, name, folder, downloader=downloader)
                    # Temporary files are their owner's alone.
                    (folder / name).chmod(os.fstat(lock_fd).st_mode & 0o666)
        finally:
            os.close(lock_fd)
    except DownloadError:
        raise
    except (OSError, ValueError) as error:  # those of requests are OSErrors
        raise DownloadError(
            f"{', '.join(files)} must come from {address} into {folder}, but “{error}”: check the "
            f"network and the folder, or put the files there yourself."
        ) from error


def _is_there(folder: Path, name: str, checksum: str) -> bool:
    """Look for a file, unpacked or else packed; what is packed must be what it is taken for."""
    if (folder / name.removesuffix(".gz")).is_file():
        return True
    path = folder / name
    if not path.is_file():
        return False
    kind, _, digits = checksum.partition(":")
    found = hashlib.new(kind, path.read_bytes(), usedforsecurity=False).hexdigest()
    if found != digits:
        raise DownloadError(
            f"{path} must have the checksum {checksum}, but has {found}, so it is damaged or of "
            f"another data set: delete it, or pass another folder."
        )
    return True
