"""The group exchange of GPUs. Never run on a GPU."""

from __future__ import annotations

from unisono.exchange.communicator import Communicator
from unisono.exchange.group_exchange import GroupExchange
from unisono.exchange.nccl_communicator import NcclCommunicator


class NcclExchange(GroupExchange):
    """An exchange of replicas through NCCL. Final; arguments as of :class:`~.protocol.Exchange`."""

    def _connect(self) -> Communicator:
        return NcclCommunicator(self._team, self.device.torch)
