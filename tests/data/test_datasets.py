"""MNIST and its relatives: pairs of images and labels, from files that belong together."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from unisono.data import mnist
from unisono.errors import DataFormatError

REAL_MNIST = Path(__file__).resolve().parents[3] / "shared" / "data" / "mnist"


def idx(values: np.ndarray) -> bytes:
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.astype("u1").tobytes()


def write_mnist(folder: Path, images: np.ndarray, labels: np.ndarray, prefix: str = "t10k") -> None:
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))


def test_mnist_gives_images_between_0_and_1_and_whole_labels(tmp_path: Path) -> None:
    images = np.zeros((5, 28, 28))
    images[2, 0, 1] = 255
    write_mnist(tmp_path, images, np.array([3, 1, 4, 1, 5]))
    dataset = mnist(tmp_path, train=False)
    image, label = dataset[2]
    assert len(dataset) == 5
    assert (image.dtype, image.shape, label.dtype) == (torch.float32, (1, 28, 28), torch.int64)
    assert image[0, 0, :3].tolist() == [0.0, 1.0, 0.0]
    assert label.item() == 4


def test_mnist_takes_packed_and_plain_files_side_by_side(tmp_path: Path) -> None:
    write_mnist(tmp_path, np.zeros((2, 28, 28)), np.array([0, 9]), prefix="train")
    plain = tmp_path / "train-images-idx3-ubyte"
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert len(mnist(tmp_path)) == 2


def test_a_missing_mnist_file_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        mnist(tmp_path)
    assert "train-images-idx3-ubyte.gz" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        mnist(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((4, 28, 28), [0, 1, 2], r"has \(4, 28, 28\) and .* \(3,\)"),
        ((4, 32, 32), [0, 1, 2, 3], r"shape \(n, 28, 28\) .* has \(4, 32, 32\)"),
        ((4, 28, 28), [[0, 1], [2, 3]], r"labels of \(n,\), .* \(2, 2\)"),
        ((2, 28, 28), [0, 26], "up to 26"),
    ],
)
def test_mnist_refuses_files_that_do_not_belong_together(
    tmp_path: Path, images: tuple[int, ...], labels: list[object], message: str
) -> None:
    write_mnist(tmp_path, np.zeros(images), np.array(labels))
    with pytest.raises(DataFormatError, match=message):
        mnist(tmp_path, train=False)


LABELS = idx(np.array([3, 1]))
DAMAGED = {
    "nothing": b"",
    "a page of the web": b"<!DOCTYPE html>",
    "half a header": LABELS[:3],
    "no sizes": LABELS[:6],
    "no values": LABELS[:8],
    "a value is missing": LABELS[:-1],
    "more than there should be": LABELS + b"\0",
    "whole numbers": b"\0\0\x0c" + LABELS[3:],
    "empty": idx(np.array([])),
    "many dimensions": bytes([0, 0, 8, 255]) + b"\0\0\0\1" * 255 + b"\0",
}


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, is_packed: bool) -> None:
    write_mnist(tmp_path, np.zeros((2, 28, 28)), np.array([0, 9]))
    place = tmp_path / "t10k-labels-idx1-ubyte"
    place.unlink()
    if is_packed:
        (tmp_path / f"{place.name}.gz").write_bytes(gzip.compress(content))
    else:
        place.write_bytes(content)
    with pytest.raises(DataFormatError, match=f"{place.name}.* again"):
        mnist(tmp_path, train=False)


def test_a_damaged_packed_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, np.zeros((2, 28, 28)), np.array([0, 9]))
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    packed = gzip.compress(LABELS)
    for damaged in (packed[:-3], b"x" + packed[1:], packed[:12] + b"\xff" + packed[13:], LABELS):
        (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(damaged)
        with pytest.raises(DataFormatError, match="again"):
            mnist(tmp_path, train=False)


@pytest.mark.slow
@pytest.mark.skipif(not REAL_MNIST.is_dir(), reason=f"MNIST is not in {REAL_MNIST}")
def test_the_real_mnist_is_read() -> None:
    pixels, labels = mnist(REAL_MNIST, train=False).tensors
    assert pixels.shape == (10_000, 1, 28, 28)
    assert labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert pixels.mean().item() == pytest.approx(0.1325, abs=1e-4)
