"""What came out of a run, in a few large numbers."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.report.events import End, Failure
from unisono.report.history import History
from unisono.report.run_progress import RunProgress
from unisono.report.text import amount, count, duration, in_page, plain, plural


def tiles(history: History) -> str:
    """Return what came out of a run as a list in HTML."""
    progress, start = history.progress, history.progress.latest
    goal = f"of {count(start.end_step)}" if start and start.end_step else ""
    if progress.epoch is not None:
        goal += f" · epoch {count(progress.epoch + 1)}"
    found = [_tile("Steps", count(progress.num_done), goal.strip(" ·"))]
    if (speed := history.mean_samples_per_second) is not None:
        found.append(_tile("Samples a second", count(speed), "in the mean"))
    found += _learning_tiles(history)
    shards = progress.first.shards if progress.first else None
    workers = count(len(progress.ranks)) if progress.ranks else "–"
    found.append(_tile("Workers", workers, plural(shards, "shard") if shards else ""))
    fits = f"in {progress.num_starts} fits" if progress.num_starts > 1 else ""
    found.append(_tile("Time in fit", duration(history.seconds or None), fits))
    found.append(_tile("Workers lost", count(progress.num_lost), _recovered(progress)))
    if isinstance(progress.ended, End) and progress.ended.digest:
        digest = plain(progress.ended.digest)[:12]
        found.append(_tile("Digest", digest, "equal in equal runs", ' class="long"'))
    return f'<ul class="tiles">{"".join(found)}</ul>'


def _tile(label: str, shown: str, below: str, css: str = "") -> str:
    return (
        f"<li><span>{in_page(label)}</span><b{css}>{in_page(shown)}</b>"
        f"<span>{in_page(below)}</span></li>"
    )


def _learning_tiles(history: History) -> Iterator[str]:
    loss = history.means.get("loss")
    if loss is not None and loss.last is not None:
        yield _tile("Loss", amount(loss.last), f"training, step {count(loss.last_step or 0)}")
    for metric in ("loss", "accuracy"):
        curve = history.validation.get(metric)
        if curve and (best := curve.best(is_low_good=metric == "loss")) is not None:
            step, value = best
            yield _tile(f"Best validation {metric}", amount(value), f"after {plural(step, 'step')}")


def _recovered(progress: RunProgress) -> str:
    if progress.num_went_back:
        return f"went back {plural(progress.num_went_back, 'time')}"
    if progress.num_lost:
        return "" if isinstance(progress.ended, Failure) else "and the run went on"
    return "none"
