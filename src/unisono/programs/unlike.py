"""Values that differ between workers, such as those computed from the rank.

Most are harmless: times, names of devices, a rank that decides who prints. To find out whether a
pass depends on one, it is computed again with another worker's value.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch

from unisono.errors import MismatchError
from unisono.programs import holders as h
from unisono.programs.account import cloned, fill
from unisono.programs.carry import Known, Packer, Unpacker, key_of, number_of
from unisono.programs.forms import Opaque
from unisono.programs.hashes import hashed
from unisono.programs.holders import Holder
from unisono.programs.walk import GENERATORS
from unisono.runtime.device import bytes_of, on_host
from unisono.runtime.workers.team import Team

_MANY = 4096  # places of a program, the nearest first
_LONG = 1024  # values of a place
_LARGE = 1 << 20  # bytes of a tensor or an array; larger ones are not compared
_SENT_AT_MOST = 16 << 20  # bytes of what is tried
_PLAIN = (type(None), bool, int, float, str)
_BY_NAME = (FunctionType, BuiltinFunctionType, CodeType, type)

_UNTRIED = (
    "`{}` differs between workers, and what another worker has there is not found here, so whether "
    "a result depends on it is unknown: choose it in the same way on every worker"
)

Places = Callable[[], tuple[Iterable[Holder], Known]]
"""Returns the places of a program, and its objects."""


class Unlike(NamedTuple):
    """A value of this worker that differs on another worker; `slot` is None for a whole tensor."""

    holder: Holder
    slot: Any
    here: Any
    there: Any

    @property
    def path(self) -> str:
        """The path to the value."""
        return self.holder.path if self.slot is None else self.holder.shown(self.slot)

    @property
    def is_present(self) -> bool:
        """Whether the place still has this worker's value."""
        with suppress(Exception):
            if self.slot is None:
                return _bytes_of(self.holder.owner) == _bytes_of(self.here)
            now = dict(h.numbered(self.holder.read()))[self.slot]
            return h.same(((), (now,)), ((), (self.here,)))
        return False

    def put(self, value: Any) -> None:
        """Set the value, unless the place has changed its kind."""
        with suppress(Exception):
            if self.slot is None:
                fill(self.holder.owner, value)
                return
            names, values = self.holder.read()
            now = dict(h.numbered((names, values)))
            now[self.slot] = value
            self.holder.put((names, tuple(now.values())))


def values_unlike(team: Team, places: Places, say: Callable[[str], object]) -> list[Unlike]:
    """Return the values in some places that differ on the next worker. Collective.

    `say` receives a line about a function or a class that only the other worker can find.
    """
    if team.size == 1:
        return []
    holders, known = places()
    mine = dict(_values(holders, Packer(known)))
    numbers = {key: number_of(packed) for key, (*_, packed) in mine.items()}
    text = json.dumps(numbers).encode()
    if len({*team.gather(b"%d" % number_of(numbers), "values of the program").values()}) == 1:
        return []
    found = [json.loads(each) for each in team.gather(text, "values that differ").values()]
    differ = {key for key in numbers if len({each.get(key) for each in found}) > 1}
    sent = dict(_sent({key: mine[key] for key in numbers if key in differ}))
    texts = team.gather(json.dumps(sent).encode(), "what differs in them")
    others = [rank for rank in texts if rank > team.world.rank] or [*texts]
    unpacker, unlike = Unpacker(known, torch.device("cpu")), list[Unlike]()
    for key, packed in json.loads(texts[others[0]]).items():
        if key in mine and packed != sent.get(key):
            holder, slot, here, _ = mine[key]
            try:
                if slot is None:
                    unlike.append(Unlike(holder, None, cloned(here), _received(here, packed)))
                else:
                    unlike.append(Unlike(holder, slot, here, unpacker.unpack(packed)))
            except Exception:
                if isinstance(here, _BY_NAME):
                    say(_UNTRIED.format(holder.shown(slot)))
    return unlike


def depends_on_unlike(value: Unlike, differs: str) -> MismatchError:
    """Return an error for a result that depends on such a value."""
    shown = ""
    if isinstance(value.here, _PLAIN) and isinstance(value.there, _PLAIN):
        shown = f" ({value.here!r:.40} here, {value.there!r:.40} on another)"
    return MismatchError(
        f"`{value.path}` differs between workers{shown}, and {differs} depends on it: compute the "
        f"same value on every worker; a loss needs no weight for the number of workers, as "
        f"gradients are means over the whole batch."
    )


@contextmanager
def as_there(values: Sequence[Unlike]) -> Iterator[None]:
    """Set the other worker's values within a block, unless they have changed here since."""
    values = [each for each in values if each.is_present]
    for each in values:
        each.put(each.there)
    try:
        yield
    finally:
        for each in values:
            each.put(each.here)


def _values(
    holders: Iterable[Holder], packer: Packer
) -> Iterator[tuple[str, tuple[Holder, Any, Any, Any]]]:
    """Yield a key, a place, a slot, the value and its packed form; objects are places themselves.

    The packed form of a tensor or an array is its hash.
    """
    # Layers of torch hold the weights of a teacher, for example.
    counted = (each for each in holders if each.kind is h.CONTENTS or not each.is_of_library)
    own = [*itertools.islice(counted, _MANY)]
    owners = {id(holder.owner) for holder in own}
    for holder in own:
        with suppress(Exception):
            if holder.kind is h.CONTENTS:
                if holder.owner.nbytes <= _LARGE:
                    yield holder.key, (holder, None, holder.owner, hashed(holder.owner))
                continue
            content = holder.read()
            for slot, value in h.numbered(content) if len(content[1]) <= _LONG else ():
                if type(slot) in (str, int):
                    with suppress(Exception):  # such as an object made in C
                        packed = _packed(packer, value, owners)
                        # The `id` of an object differs between workers.
                        name = slot if type(slot) is str else json.dumps(packer.pack(slot))
                        yield f"{holder.key}\0{name}", (holder, slot, value, packed)


def _packed(packer: Packer, value: Any, owners: set[int]) -> Any:
    if type(value) in _PLAIN:
        return packer.pack(value)
    is_place = id(value) in owners and not isinstance(value, _BY_NAME)
    if is_place or isinstance(value, GENERATORS):  # which are seeded alike
        return ""
    code = getattr(value, "__code__", value)
    try:
        return packer.pack(value, inside=True)
    except Opaque:
        if isinstance(code, CodeType):
            return {"@": "unknown", "of": key_of(code)}
        raise


def _sent(values: Mapping[str, tuple[Holder, Any, Any, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the values that fit into a message, as JSON, the nearest first."""
    room = _SENT_AT_MOST
    for key, (_, slot, value, packed) in values.items():
        if slot is None and value.nbytes <= room:
            room -= value.nbytes
            yield key, base64.b64encode(_bytes_of(value)).decode()
        elif slot is not None:
            with suppress(TypeError):
                room -= len(json.dumps(packed))
                yield key, packed
        if room < 0:
            return


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return bytes(bytes_of(on_host(value.detach()).contiguous()))


def _received(here: Any, text: str) -> Any:
    """Return a tensor or an array like `here` of its bytes on another worker."""
    data = bytearray(base64.b64decode(text))
    if isinstance(here, np.ndarray):
        return np.frombuffer(data, here.dtype).reshape(here.shape)
    return torch.frombuffer(data, dtype=here.dtype).reshape(here.shape)
