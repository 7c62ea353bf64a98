"""What a report says of the memory of devices: in words, over the run, and for each worker."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.report.curves import over_steps
from unisono.report.figure import Figure, Key, curve_trace, series_colour
from unisono.report.history import History
from unisono.report.memory_use import MemoryUse
from unisono.report.text import plural, size

HEADS = ("Worker", "Tensors, last", "Tensors, most", "Kept by torch, most")
_NEARLY_ALL = 0.9
_LABELS = {"allocated": "tensors", "reserved": "kept by torch", "peak": "tensors, most so far"}
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def in_words(memory: MemoryUse) -> str:
    """Say who took most, and how much of a device that is."""
    peaks = {rank: most.peak for rank, most in memory.most.items() if most.peak is not None}
    if not peaks:
        return "What the workers took of their devices, as far as the file says."
    rank = max(peaks, key=peaks.__getitem__)
    words = f"Tensors took at most {size(peaks[rank])}, on worker {rank}."
    if memory.device_bytes is None:
        return words
    share = peaks[rank] / memory.device_bytes
    words += f" That is {share:.0%} of the {size(memory.device_bytes)} of its device."
    if share > _NEARLY_ALL:
        words += " Little is left: a larger batch or a longer input may not fit."
    return words


def over_the_run(history: History) -> Figure:
    """Return what the worker took that took most, over the run."""
    memory = history.memory
    drawn = {name: series for name, series in memory.over_steps.items() if series.values}
    highest = max((one.high for series in drawn.values() for one in series.values), default=0.0)
    unit_bytes, unit = next(((n, name) for n, name in _UNITS if highest >= n), (1.0, "bytes"))
    data, keys = [], []
    for number, (name, series) in enumerate(drawn.items()):
        label, colour = _LABELS[name], series_colour(number)
        steps = [one.middle_step for one in series.values]
        data.append(
            curve_trace(
                steps,
                [one.high / unit_bytes for one in series.values],
                label,
                colour,
                hovertemplate=f"step %{{x:,.0f}}<br>{label}: %{{y:.4g}} {unit}<extra></extra>",
            )
        )
        keys.append(Key(label, colour, label))
    layout = over_steps(data, history.marks, from_zero=True)
    layout["yaxis"]["title"] = {"text": unit}
    note = (
        "The worker that takes most, a few times a second. What torch keeps beyond its tensors is "
        "free for further ones, but not for other processes."
    )
    return Figure("Over the run", note, data, layout, 260, tuple(keys), is_wide=True)


def rows(memory: MemoryUse) -> Iterator[tuple[str, ...]]:
    """Give a row for each worker, under :data:`HEADS`."""
    for rank in sorted(memory.last):
        last, most = memory.last[rank], memory.most[rank]
        yield f"worker {rank}", size(last.allocated), size(most.peak), size(most.reserved)
    if memory.num_left_out:
        yield f"{plural(memory.num_left_out, 'more worker')}", "", "", ""
