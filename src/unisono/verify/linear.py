"""How does one gradient relate to others? Ratios, and weights of a sum, read off sketches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.verify.trace import Gradient, Vector

Array = NDArray[np.float64]
_EPS = {"float64": 2.2e-16, "float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.8e-3}
_AT_MOST = 0.1


@dataclass(frozen=True, slots=True)
class Relation:
    """``x ≈ factor · y``."""

    factor: float  # the best one
    rest: float  # what it leaves, in lengths of `x`
    cosine: float  # of the angle between both


def tolerance(dtype: str, size: int, step: int) -> float:
    """Return how far two gradients may be apart by rounding alone, in their lengths.

    Sums over `size` elements in another order differ by about ``eps · √size``; the constants leave
    room for several layers. What rounding has done to the parameters adds up from step to step.
    """
    eps = _EPS.get(dtype, _EPS["bfloat16"])
    return float(min(_AT_MOST, eps * (256 + 16 * size**0.5) * (1 + 4 * step)))


def relation(x: Array, y: Array) -> Relation:
    """Compare two vectors."""
    length_x, length_y = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if length_x == 0 or length_y == 0:
        return Relation(1.0 if length_x == length_y else 0.0, float(length_x != length_y), 0.0)
    factor = float(x @ y) / length_y**2
    rest = float(np.linalg.norm(x - factor * y)) / length_x
    return Relation(factor, rest, float(x @ y) / (length_x * length_y))


def weights(x: Array, columns: Sequence[Array]) -> tuple[Array, float]:
    """Write a vector as a weighted sum of others.

    Returns:
        The weights, the shortest if there are several, and what they leave, in lengths of `x`.
    """
    matrix = np.stack(columns, axis=1)
    found: Array = np.asarray(np.linalg.lstsq(matrix, x, rcond=1e-9)[0], dtype=np.float64)
    length = float(np.linalg.norm(x))
    rest = float(np.linalg.norm(x - matrix @ found)) / length if length else 0.0
    return found, rest


def joined(vectors: Sequence[Vector]) -> Array:
    """Put the sketches of all parameters one behind the other."""
    return np.array([number for vector in vectors for number in vector], dtype=np.float64)


def local(gradient: Gradient) -> Array:
    """Add up what the passes of a rank gave to one parameter."""
    if not gradient.passes:
        return np.zeros(len(gradient.final))
    return np.asarray(np.array(gradient.passes, dtype=np.float64).sum(axis=0))


def passes_joined(gradients: Mapping[str, Gradient], names: Sequence[str]) -> list[Array]:
    """Give each pass's gradient of all parameters; those without one in a pass count as zero."""
    of_all = [gradients[name] for name in names]
    num_passes = max((len(gradient.passes) for gradient in of_all), default=0)
    return [
        joined(
            [g.passes[at] if len(g.passes) == num_passes else (0.0,) * len(g.final) for g in of_all]
        )
        for at in range(num_passes)
    ]


def distance(x: Array, y: Array) -> float:
    """Return how far two vectors are apart."""
    return float(np.linalg.norm(x - y))
