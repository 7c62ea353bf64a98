"""The seam between a step and whatever carries its gradients: what every exchange can do.

::

    publish(part)…    each worker its parts, one after the other
    gather            ─── all meet ───  or: somebody was lost, these are computed here
    add_up            the sums of this worker's pieces, in tree order
    all_sums, agree   where something needs more than its own pieces: a norm, a vote
    share             ─── all meet ───  what was updated is everybody's

Records, buffers and snapshots are in the host's memory whatever the exchange is, so it is known who
has done what when a worker is lost (:class:`RunMemory`). Which exchange a run uses is not part of
its identity: one may save what another loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from unisono.exchange.buffers import Buffers
from unisono.exchange.division import Division
from unisono.exchange.homes import Homes
from unisono.exchange.run_memory import RunMemory
from unisono.plan.slices import Piece
from unisono.plan.summation import Node

Gradients = Sequence["torch.Tensor | None"]


class Exchange(Protocol):
    """Carries the gradients of one loop. Every method but `publish` and `totals` is collective.

    Attributes:
        parameters: those that the optimizer updates, in an order that is the same everywhere.
        fixed: those that it does not.
        buffers: the model's.
        division: which shards, parts and pieces are whose.
        memory: what the workers of this host share.
        homes: where parameters and optimizer state lie in pieces; None: whoever updates does so
            with whole parameters and the state that its own optimizer has.
    """

    parameters: list[torch.nn.Parameter]
    fixed: list[torch.nn.Parameter]
    buffers: Buffers
    division: Division
    memory: RunMemory
    homes: Homes | None

    @property
    def acts(self) -> bool:
        """Whether this worker updates."""

    @property
    def whole(self) -> list[torch.Tensor]:
        """The sums of all parameters, as those lie; see :meth:`all_sums`."""

    @property
    def is_lost(self) -> bool:
        """Whether what only one worker had was lost with it, and the run has to go back."""

    @property
    def have_all(self) -> bool:
        """Whether every worker has the whole state, so that the leader may be lost at any time."""

    def divide(self) -> None:
        """Divide the work anew among those who are members now."""

    def publish(self, part: Node, gradients: Gradients) -> None:
        """Show the others a part of this worker's, which may be lost from here on.

        Raises:
            TypeError: a gradient is sparse.
        """

    def gather(self, purpose: str) -> list[Node] | None:
        """Meet the others once the own parts are published.

        Returns:
            None once everybody's are. Else somebody was lost, and these are to be published, too,
            maybe none; then this is called again.
        """

    @property
    def pieces(self) -> Sequence[Piece]:
        """What this worker adds up: pieces of the parameters, or all of them whole."""

    @property
    def totals(self) -> Sequence[torch.Tensor]:
        """The sums over :attr:`pieces`, as vectors."""

    def add_up(self) -> tuple[bool, ...]:
        """Add up this worker's pieces of all parts, in tree order.

        Returns:
            For each parameter, whether any shard had a gradient for it; only then are its sums
            defined.
        """

    def all_sums(self, purpose: str) -> bool:
        """Wait until :attr:`whole` has everybody's sums.

        Returns:
            Whether it has; False if somebody was lost.
        """

    def are_read(self, purpose: str) -> bool:
        """Wait until everybody has read :attr:`whole`, before own sums are changed.

        Returns:
            Whether everybody has; False if somebody was lost.
        """

    def agree(self, value: bytes, purpose: str) -> list[bytes] | None:
        """Hear what those say whose sums this worker does not have; the same list for all.

        Returns:
            None if somebody was lost.
        """

    def share(self, purpose: str) -> bool:
        """Have what this worker has updated, and what the others have, be everybody's.

        Returns:
            Whether it is; False if somebody was lost and :meth:`load` has to be called.
        """

    def save(
        self, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, alone: bool = False
    ) -> int:
        """Copy the state into a snapshot, each worker a share.

        Args:
            facts: what is to be known beside it, plain JSON.
            tensors: what is to be kept beside what the exchange has.
            alone: copy all of it; not collective then.

        Returns:
            The slot; it is whole once everybody has done so.
        """

    def trust_leader(self) -> None:
        """Take what the leader has, and others may not have, for that of the run."""

    def load(self) -> None:
        """Make the newest snapshot the present state."""

    def hand_out(self) -> None:
        """Give every worker the state that only one had, from the newest snapshot, at a loop's end.

        Not collective.
        """

    def hand_round(self) -> None:
        """Give every worker the state that only one had, where there is no snapshot.

        State that cannot be kept stays where it is.
        """

    def unbind(self) -> None:
        """Give the model tensors of its own again; not collective. Values stay as they are."""
