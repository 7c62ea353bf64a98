"""Which samples of different ranks are the same one? Index, or content, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.verify.raw_trace import RawTrace


class Identities:
    """Names samples. Final.

    Ranks may share a dataset, or each make one of its own part. Where all samples were read, their
    contents say which is which, unless two samples of a dataset have the same. Else the index
    says it, as long as no content speaks against it.

    Args:
        traces: of all ranks, of one run or several.
    """

    def __init__(self, traces: Sequence[RawTrace]) -> None:
        self._traces = traces
        self._by_content = self._are_distinct()
        datasets = {dataset for trace in traces for dataset in trace.contents}
        self._same = {dataset for dataset in datasets if self._is_same(dataset)}

    def name(self, trace: RawTrace, dataset: int, indices: Iterable[int]) -> tuple[str, ...] | None:
        """Name samples; None where nobody can tell which they are."""
        if self._by_content:
            contents = trace.contents.get(dataset, {})
            names = [contents.get(index) for index in indices]
            found = tuple(name for name in names if name is not None)
            return found if len(found) == len(names) else None
        if dataset in self._same:
            return tuple(f"{dataset}:{index}" for index in indices)
        return None

    def are_shared(self, dataset: int) -> bool:
        """Tell whether an index means the same sample on all ranks."""
        return dataset in self._same

    def _are_distinct(self) -> bool:
        for trace in self._traces:
            for dataset, length in trace.lengths.items():
                contents = trace.contents[dataset]
                if len(contents) < length or len(set(contents.values())) < length:
                    return False
        return any(trace.contents for trace in self._traces)

    def _is_same(self, dataset: int) -> bool:
        known = [t for t in self._traces if dataset in t.contents]
        if len({trace.lengths[dataset] for trace in known}) != 1:
            return False
        first = known[0].contents[dataset]
        return all(
            first.get(index, value) == value
            for trace in known
            for index, value in trace.contents[dataset].items()
        )
