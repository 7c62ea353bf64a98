"""torch's rendezvous, at one address, without reading pickles that could run something.

torch's own listens at all addresses. Its state is a pickle in a store that anybody can write who
reaches it; here it is read only if it names nothing but what such states consist of.
"""

from __future__ import annotations

import errno
import io
import math
import pickle
from contextlib import closing
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from unisono.timeouts import RENDEZVOUS
from unisono.workers.job_store import listen

_NAME = "unisono"
_STATES_CONSIST_OF = {
    (dynamic_rendezvous.__name__, "_RendezvousState"),
    (dynamic_rendezvous.__name__, "_NodeDesc"),
    *(("datetime", name) for name in ("datetime", "timedelta", "timezone")),
}
_OPERATION_TAKES_AT_MOST = timedelta(seconds=60)


def meet_hosts(
    place: tuple[str, int], num_hosts: int, *, address: str, is_first: bool
) -> DynamicRendezvousHandler:
    """Connect to the rendezvous of the hosts, and have it here on the first one.

    Args:
        place: its address and port.
        num_hosts: how many hosts there are.
        address: where the others reach this host.
        is_first: whether the rendezvous is here.

    Raises:
        RendezvousError: torch's; it cannot be reached, or the port is taken.
    """
    store = _serve(*place) if is_first else _store(*place, is_master=False)
    timeout = RendezvousTimeout(join=timedelta(seconds=math.ceil(RENDEZVOUS.in_s())))
    backend, sizes = CheckedBackend(store, _NAME), (num_hosts, num_hosts)
    handler: DynamicRendezvousHandler = _Handler.from_backend(
        _NAME, store, backend, *sizes, address, timeout
    )
    return handler


def _serve(address: str, port: int) -> TCPStore:
    """Have a store that listens at an address; at all of them if it is not one of this host's."""
    try:
        listening = listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise RendezvousConnectionError(str(error)) from error
        return _store(address, port, is_master=True)  # forwarded to this host by another one
    with closing(listening):
        port = listening.getsockname()[1]
        return _store(address, port, is_master=True, master_listen_fd=listening.detach())


def _store(address: str, port: int, **options: Any) -> TCPStore:
    options |= {"multi_tenant": True, "timeout": _OPERATION_TAKES_AT_MOST}
    try:
        return TCPStore(address, port, **options)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error


class _Handler(DynamicRendezvousHandler):
    """Has the store of a job's workers listen at the address of its host, too."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        return _serve(master_addr, master_port)


class CheckedBackend(C10dRendezvousBackend):
    """Gives torch no state that names anything which is none of a rendezvous. Final."""

    def get_state(self) -> Any:
        """See torch's; raises RendezvousStateError, too."""
        return self._checked(super().get_state())

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """See torch's; raises RendezvousStateError, too."""
        return self._checked(super().set_state(state, token))

    def _checked(self, found: tuple[Any, ...] | None) -> Any:
        """Read a state, which comes first of what was found."""
        if found is not None:
            try:
                _OfStates(io.BytesIO(found[0])).load()
            except Exception as error:  # whatever is no pickle raises anything
                raise RendezvousStateError(
                    f"it must hold the hosts' own notes, but somebody else has written there: "
                    f"{error}"
                ) from error
        return found


class _OfStates(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STATES_CONSIST_OF:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")
