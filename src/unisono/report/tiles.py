"""What came out of a run, in a few large numbers."""

from __future__ import annotations

from unisono.report.events import End, Failure
from unisono.report.history import History
from unisono.report.run_progress import RunProgress
from unisono.report.text import amount, count, duration, in_page, plain, plural


def tiles(history: History) -> list[str]:
    """Return what came out of a run as entries of a list."""
    course, start = history.course, history.course.latest
    goal = f"of {count(start.end_step)}" if start and start.end_step else ""
    if course.epoch is not None:
        goal += f" · epoch {count(course.epoch + 1)}"
    found = [_tile("Steps", count(course.num_done), goal.strip(" ·"))]
    speed = history.mean_samples_per_second
    if speed is not None:
        found.append(_tile("Samples a second", count(speed), "in the mean"))
    found += _learning_tiles(history)
    found.append(_workers_tile(course))
    found.append(_tile("Time in fit", duration(history.seconds or None), _fits(course)))
    found.append(_recoveries_tile(course))
    if isinstance(course.ended, End) and course.ended.digest:
        digest = plain(course.ended.digest)
        found.append(_tile("Digest", digest[:12], "equal in equal runs", "long"))
    return found


def _tile(label: str, shown: str, below: str = "", kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return (
        f"<li><span>{in_page(label)}</span><b{css}>{in_page(shown)}</b>"
        f"<span>{in_page(below)}</span></li>"
    )


def _learning_tiles(history: History) -> list[str]:
    found = []
    loss = history.means.get("loss")
    if loss is not None and loss.last is not None:
        below = f"training, step {count(loss.last_step or 0)}"
        found.append(_tile("Loss", amount(loss.last), below))
    for metric in ("loss", "accuracy"):
        if metric in history.validation:
            best = history.validation[metric].best(is_low_good=metric == "loss")
            if best is not None:
                title = f"Best validation {metric}"
                found.append(_tile(title, amount(best[1]), f"after {plural(best[0], 'step')}"))
    return found


def _workers_tile(course: RunProgress) -> str:
    shards = course.first.shards if course.first else None
    shown = count(len(course.ranks)) if course.ranks else "–"
    return _tile("Workers", shown, plural(shards, "shard") if shards else "")


def _fits(course: RunProgress) -> str:
    return f"in {course.num_starts} fits" if course.num_starts > 1 else ""


def _recoveries_tile(course: RunProgress) -> str:
    below = "none"
    if course.num_went_back:
        below = f"went back {plural(course.num_went_back, 'time')}"
    elif course.num_lost:
        below = "" if isinstance(course.ended, Failure) else "and the run went on"
    return _tile("Workers lost", count(course.num_lost), below)
