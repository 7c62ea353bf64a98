"""What a slow link keeps from step to step, such as what rounding has taken from gradients.

For each label a tensor like each parameter, in memory that the workers of a host share: each writes
its pieces. Snapshots have all of them, as this is an object with a state in ``run.state``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.exchange.arena import Plan, Region, size_of
from unisono.exchange.slow_link import SlowLink
from unisono.plan.slices import Piece
from unisono.workers.team import Team

SLOW_LINK_KEY = "slow_link"
"""Names it in ``run.state``."""


class LinkState:
    """What is kept for one run. Final.

    Args:
        link: how less is sent, with its number of groups.
    """

    def __init__(self, link: SlowLink) -> None:
        self.link = link
        self._kept: dict[str, dict[str, torch.Tensor]] = {}
        self._regions: dict[str, Region] = {}
        self._are_new: set[str] = set()
        self._end: torch.Tensor | None = None  # the parameters when a loop has ended
        self.step = 0
        self.weight: float | None = None

    @property
    def num_groups(self) -> int:
        """How many groups of shards there are."""
        return self.link.num_groups

    def bind(self, team: Team, key: int, plan: Plan, *, is_joining: bool) -> None:
        """Begin a loop; the others have to be met before anybody changes anything. Collective.

        Args:
            key: names the memory.
            is_joining: whether the others use the memory already.
        """
        rows, start = self.link.rows(plan.parameters, plan.states), 0
        memory = self._memory = team.memory(key, max(1, self.num_bytes(plan)))
        for label, slots in rows.items():
            self._regions[label] = Region(memory, start, slots)
            start += size_of(slots)
        self._are_new = {label for label in rows if label not in self._kept}
        if is_joining:
            self._are_new.clear()
        else:
            self._put(self._kept)

    def num_bytes(self, plan: Plan) -> int:
        """Count the bytes that it takes."""
        return sum(map(size_of, self.link.rows(plan.parameters, plan.states).values()))

    def begin(self, parameters: Region) -> None:
        """Begin with the present parameters what begins as these, where nothing was kept.

        So does what was kept, if the program has changed the parameters between two loops.
        """
        labels = set(self.link.begin_as_parameters)
        if self._end is None or torch.equal(self._end, parameters.everything()):
            labels &= self._are_new
        for label in labels:
            self._regions[label].everything().copy_(parameters.everything())

    def begin_sum(self, step: int, weight: float | None) -> None:
        """Take note of the step whose sums are made.

        Args:
            step: counted over the whole run.
            weight: what its sums are to be divided by before they are made smaller; None: nothing.
        """
        self.step, self.weight = step, weight

    def region(self, label: str) -> Region:
        """Give what is kept under a label, as the parameters or the optimizer's state lie."""
        return self._regions[label]

    def bytes(self, label: str) -> memoryview:
        """Give what is kept under a label as bytes."""
        region = self._regions[label]
        return self._memory.view(region.start, region.slots[0].numel)

    def unbind(self, parameters: Region) -> None:
        """Have all values here, at a loop's end; not collective."""
        if self._regions:
            self._end = parameters.everything().clone()
            self._kept = {
                label: {name: value.clone() for name, value in values.items()}
                for label, values in self.state_dict().items()
            }
            self._regions = {}

    def pieces(self, label: str, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """View pieces of what is kept under a label, as vectors."""
        return self._regions[label].pieces(pieces)

    def state_dict(self) -> dict[str, Any]:
        """Give all values, by label and parameter; to be called between two steps."""
        if not self._regions:
            return self._kept
        return {
            label: {
                slot.name: value for slot, value in zip(region.slots, region.tensors(), strict=True)
            }
            for label, region in self._regions.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over all values; what another link has kept is dropped."""
        self._kept = {label: dict(values) for label, values in state.items()}
        self._end = None
        self._put(self._kept)

    def _put(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set what is bound; every worker of a host writes the same."""
        for label, region in self._regions.items():
            values = state.get(label, {})
            for slot, there in zip(region.slots, region.tensors(), strict=True):
                value = values.get(slot.name)
                if value is not None and value.shape == there.shape:
                    there.copy_(value)
