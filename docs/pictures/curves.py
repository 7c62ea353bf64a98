"""Draw the validation losses that the programs of ``docs/problems/accuracy.md`` print."""

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.shown_runs import REPOSITORY, printed, programs_of

HERE = Path(__file__).parent
PAGE = REPOSITORY / "docs" / "problems" / "accuracy.md"
WORKERS, NAMES = (1, 2, 4), ("1 process", "2 processes", "4 processes")
PANELS = (
    ("DDP, 32 images per process: the batch grows", "torchrun --nproc-per-node {} ddp.py 32"),
    ("Unisono, 32 images per batch on any number", "unisono run -n {} train.py"),
)
# Text, grid, and a line for each number of workers.
LIGHT = ("#1f2328", "#d0d7de", ("#2a60c8", "#0e8a62", "#d0490f"))
DARK = ("#e6edf3", "#3d444d", ("#79a8ff", "#3fc99a", "#ff9c66"))
WIDTH, HEIGHT, LEFT, TOP, TALL = 470, 240, 36, 44, 170
LABELS = 176  # the width of what stands behind the lines
MOST = 2.2  # the largest loss that is drawn


def draw() -> None:
    """Run the programs; write pictures for light and dark pages, wide and narrow."""
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs_of(PAGE).items():
            (Path(folder) / name).write_text(program)
        curves = [
            [_losses(printed(command.format(n), Path(folder))) for n in WORKERS]
            for _, command in PANELS
        ]
    for name, colors in (("curves", LIGHT), ("curves-dark", DARK)):
        for width, across in (("", 2), ("-narrow", 1)):  # the narrow ones are for phones
            lines = _picture(curves, across, *colors)
            (HERE / f"{name}{width}.svg").write_text("\n".join(lines) + "\n")


def _losses(lines: Sequence[str]) -> list[float]:
    return [float(value) for value in re.findall(r"validation loss ([\d.]+)", "\n".join(lines))]


def _picture(
    curves: Sequence[Sequence[Sequence[float]]],
    across: int,
    text: str,
    grid: str,
    colors: Sequence[str],
) -> Iterator[str]:
    size = f"{across * WIDTH} {len(PANELS) // across * HEIGHT}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{text}">'
    )
    for number, ((title, _), lines) in enumerate(zip(PANELS, curves, strict=True)):
        down, right = divmod(number, across)
        yield f'<g transform="translate({right * WIDTH} {down * HEIGHT})">'
        yield f'<text x="{LEFT}" y="20" font-size="14" font-weight="600">{title}</text>'
        yield from _axes(len(lines[0]), text, grid)
        are_one, height = all(line == lines[0] for line in lines), math.inf
        for index, (line, color) in enumerate(zip(lines, colors, strict=True)):
            # Lines in one place are seen, as each is thinner than the one below it.
            thick = (9, 5, 2)[index] if are_one else 2.5
            points = " ".join(f"{_x(at, line):.1f},{_y(loss):.1f}" for at, loss in enumerate(line))
            stroke = f'fill="none" stroke="{color}" stroke-width="{thick}"'
            yield f'<polyline points="{points}" {stroke}/>'
            if are_one and index:
                continue
            said = "1, 2, 4 workers" if are_one else NAMES[index]
            height = min(_y(line[-1]) + 4, height - 17)
            label = f'x="{_x(len(line) - 1, line) + 8:.1f}" y="{height:.1f}"'
            yield f"<text {label}>{said}: {line[-1]:.4f}</text>"
        yield "</g>"
    yield "</svg>"


def _axes(epochs: int, text: str, grid: str) -> Iterator[str]:
    right = _x(epochs - 1, range(epochs))
    for loss in (0, 1, 2):
        y = f"{_y(loss):.1f}"
        yield f'<path d="M{LEFT} {y}H{right:.1f}" stroke="{grid}"/>'
        yield f'<text x="{LEFT - 8}" y="{_y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
    below = f'y="{TOP + TALL + 18}" text-anchor="middle"'
    for epoch in (1, epochs):
        yield f'<text x="{_x(epoch - 1, range(epochs)):.1f}" {below}>{epoch}</text>'
    yield f'<text x="{(LEFT + right) / 2:.1f}" {below}>epoch</text>'
    yield f'<text x="{LEFT}" y="{TOP - 4}" font-size="12">validation loss</text>'


def _x(at: int, line: Sequence[object]) -> float:
    return LEFT + at * (WIDTH - LEFT - LABELS) / (len(line) - 1)


def _y(loss: float) -> float:
    return TOP + TALL * (1 - loss / MOST)


if __name__ == "__main__":
    draw()
