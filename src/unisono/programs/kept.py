"""The program's changes between steps, as a part of its run's state.

::

    a loop begins    watch ─► baseline                 all that the program has made of its objects
    looks            compare ─► alike on all workers?  first steps, powers of two, snapshots
    a snapshot       state_dict ─► values              what differs from the baseline
    back, resumed    load_state_dict

There is no list of special cases: everything that the callbacks, optimizers, schedules, losses,
models, datasets and loops lead to (``walk.py``) is compared with its first state, and what differs
is carried (``carry.py``). A change that cannot be carried raises an error when it is first seen.
By rehearsal, nothing depends on the values that passes store, and they stay local to each worker,
but for numbers and small tensors that are the same on all: the program may change these as well.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import suppress
from copy import copy as copied
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

from unisono.errors import CheckpointError, MismatchError
from unisono.programs import holders as h
from unisono.programs.account import (
    Account,
    ChangedPlace,
    cloned,
    fill,
    has_bits_of,
    over_memory_of,
)
from unisono.programs.carry import AS_IT_IS, Known, Ours, Packer, Unpacker, number_of
from unisono.programs.forms import Opaque, is_value, leads_to
from unisono.programs.frames import KeptFrame
from unisono.programs.generators import copy_of, set_state
from unisono.programs.holders import Content, Holder
from unisono.programs.overlaps import overlapping
from unisono.programs.settings import PLAIN, SETTINGS_OF_PROCESS, bare
from unisono.programs.unchanged import Unchanged
from unisono.programs.walk import Walk, is_of_a_library, is_of_process
from unisono.runtime.workers.team import Team

OPTIMIZER = "the optimizer"
KEY = "unisono.program"
"""Its key in a run's state, which no program uses."""

_NOT_KEPT_LINE = (
    "{} has changed since the loop began, and is not kept with the run: a worker that joins and a "
    "resumed run begin with what the program makes"
)
_ALONE_LINE = (
    "`{}` differs from worker to worker, as times do, so all that is in it is each worker's own, "
    "and a worker that joins begins without"
)
_IMPORTED_LINE = (
    "`{}` was first imported after the loop began, so what changes in it is not kept with the run: "
    "import it before, or a worker that joins and a resumed run begin with what it has at first"
)
_UNSEEN_LINE = (
    "`{}` (a {}) cannot be looked into, so what changes in it is not kept with the run: a worker "
    "that joins and a resumed run begin with what the program makes"
)
_THREAD_LINE = (
    "the program has started a thread since the loop began (`{}`): a worker that joins and a "
    "resumed run begin without it"
)
_MALFORMED = (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError, Opaque)
_BY_SLOT: tuple[h.Kind, ...] = (h.HOOKS, h.ATTRIBUTES, h.SLOTS, h.CELLS, h.NAMES, h.FRAME)
_BY_SLOT += (h.PATCHED, h.ADDED, h.COMPUTED, h.FUNCTION, h.TENSOR, h.SETTINGS, h.NAMED)
# The walk determines which names count.
_BY_WALK: tuple[h.Kind, ...] = (h.NAMES, h.NAMED, h.FRAME, h.FUNCTION, h.SETTINGS)
_BY_WALK += (h.PATCHED, h.ADDED, h.COMPUTED)
_MORE = "*"  # of a container: anything that is added to it
_OF_PYTHON = ("builtins", "itertools", "collections")
_FEW, _SMALL = 64, 1 << 16  # values of a place, and bytes of one, that passes store
_GROW = (h.ENTRIES, h.ITEMS, h.ELEMENTS)


class _Place(NamedTuple):
    """A place, its content when it was first seen, and whether passes read it."""

    holder: Holder
    content: Content
    copy: Any
    is_read_in_passes: bool


@final
class KeptProgram:
    """The program's changes, as an object with a state.

    Args:
        model: the model, whose parameters and buffers are stored elsewhere.
        more: returns further tensors stored elsewhere, such as an optimizer's.
        run_state: the program's `run.state`, which is saved elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        more: Callable[[], Iterable[torch.Tensor]],
        run_state: MutableMapping[str, Any],
    ) -> None:
        self._model, self._more = model, more
        self._run_state, self._run_state_then = run_state, dict[str, Any]()
        self._places: dict[str, _Place] = {}
        self._unchanged = Unchanged({})
        self._known = Known({}, set(), self._tensors)
        self._loop = 0
        self._after: dict[str, Any] | None = None  # `on_begin` of the current loop
        self._loaded: Mapping[str, Any] | None = None
        self.drawn: Any = None  # the positions of generators, when a state was restored
        self._drawn_now: Callable[[], Any] = list
        self._own: set[str] = set()  # slots that differ between workers
        self._stored: set[tuple[int, str, str]] = set()  # slots that passes write
        self._saving: set[int] = set()  # callbacks with their own state
        self._of_model = set[int]()  # the modules of the run's model
        self._left: dict[str, Any] = {}  # of libraries, by path
        self._alone = set[str]()  # differs between workers, and is not a plain value
        self._left_at_first: dict[str, Any] = {}  # the same, as `on_begin` left it
        self._unseen = dict[str, str]()
        self._threads = set[threading.Thread]()  # those that run when the loop begins
        self._modules = set[str]()  # that are loaded when the loop begins
        self._caches = list[tuple[Holder, Content]]()  # of callbacks alone
        self.is_cut = False
        self.has_all_frames = True  # of the current loop; until then some paths are unknown

    def watch(
        self,
        passes: Mapping[str, Any],
        between: Mapping[str, Any],
        loops: Iterable[KeptFrame],
        themselves: Collection[int] = (),
        apart: Collection[int] = (),
    ) -> None:
        """Record the state of everything that some objects lead to, before anything is restored.

        `passes`: objects that passes read; `between`: objects used only between steps; `loops`:
        frames of the program's own loop; `themselves`: identities of objects whose attributes are
        saved elsewhere; `apart`: identities of objects to ignore.
        """
        self._after = None
        self._run_state_then = dict(self._run_state)
        self._threads, self._modules = {*threading.enumerate()}, {*sys.modules}
        self._caches.clear()
        state = self._tensors().values()
        optimizers = (one for one in between.values() if isinstance(one, torch.optim.Optimizer))
        layers = {id(one) for one in (*self._model.modules(), *optimizers)}
        saving = {id(one) for one in between.values() if _saves_itself(one)}
        self._saving = saving - layers - {*themselves}
        self._of_model = {*map(id, self._model.modules())}
        walk = Walk(passes, {*map(id, state), *apart}, layers, themselves, self._saving)
        num_read, unseen_in_passes = len(walk.holders), {*walk.unseen}
        for frame in loops:
            walk.extend({"": frame})
        num_seeded = len(walk.holders)  # generators before it are seeded with the default ones
        of_all = {**h.HOOKS_OF_MODULES, **h.HOOKS_OF_OPTIMIZERS}
        walk.extend({**between, "": SETTINGS_OF_PROCESS, **of_all})
        self.is_cut = walk.is_cut
        self._unseen = {
            path: kind for path, kind in walk.unseen.items() if path not in unseen_in_passes
        } | walk.lost
        before = {place.holder.identity: place for place in self._places.values()}
        # Tensors over the memory of parameters are stored with the parameters.
        apart = over_memory_of(state, walk.holders)
        kept = {
            holder.key: before[holder.identity].content
            for holder in walk.holders
            if holder.kind is h.CONTENTS
            and holder.identity in before
            and id(holder.owner) not in apart
        }
        account = Account([each for each in walk.holders if each.key not in kept], apart=apart)
        self._places = {}
        for at, holder in enumerate(walk.holders):
            then = kept.get(holder.key) or account.content(holder)
            if holder.kind in (h.DRAWN, h.POSITION) and at >= num_seeded:
                with suppress(OSError):
                    then = holder.read()
            if then is None and holder.kind in (h.FROZEN, h.CONTENTS):
                self._unseen[holder.path] = h.name_of(type(holder.owner))  # has no parts to read
            if holder.kind is h.CACHE and at >= num_read and not holder.is_of_library:
                self._caches.append((holder, holder.read()))
            if then is None or holder.kind is h.CACHE:
                continue
            known = before.get(holder.identity)
            if known is not None:
                content = known.content
                has_all = h.has_all_names(holder) and h.has_all_names(known.holder)
                if holder.kind in _BY_WALK and not has_all:
                    content = _of_names(content, then, known.holder.names or (), holder.names or ())
                place = _Place(holder, content, known.copy, at < num_read)
            else:
                place = _Place(holder, then, _copy(account, holder), at < num_read)
            self._places[holder.key] = place
        self._unchanged = Unchanged(
            {key: (place.holder, place.content) for key, place in self._places.items()}
        )
        self._known = Known(walk.things, walk.names, self._tensors)

    @property
    def things(self) -> Iterable[Any]:
        """All objects that the program leads to."""
        return self._known.things.values()

    def stored_in_passes(self, changes: Iterable[ChangedPlace]) -> None:
        """Exclude values that passes were seen to write, which stay local to each worker."""
        for change in changes:
            identity = change.holder.identity
            self._stored |= {(*identity, str(slot)) for slot in change.slots}
            place = self._places.get(change.holder.key)
            known = () if place is None else place.content[0]
            if change.holder.kind in _GROW and not {*change.slots} <= {*known}:
                self._stored.add((*identity, _MORE))

    @property
    def loaded_loop(self) -> int | None:
        """The number of the loop whose state was loaded and not yet restored in it, or None."""
        return None if self._loaded is None else int(self._loaded["loop"])

    def is_continued(self, loop: int) -> bool:
        """Return whether the loop of this number had begun before, in another process."""
        return self.loaded_loop == loop

    def has_begun(self, loop: int, drawn_now: Callable[[], Any], team: Team | None) -> Any:
        """Undo what `on_begin` has reset, if the loop of this number had begun before.

        `drawn_now` returns the positions of random generators; this returns their positions at that
        time, or None. Collective if there is a `team`: values that `on_begin` sets differently on
        each worker, such as its rank, stay as they are.
        """
        drawn, values = None, None if team is None else self.compare(team)
        if self._loaded is not None and self.is_continued(loop):
            # What has lost its tensors helps the program to take the same course, no more.
            with suppress(*[CheckpointError] * ("lost" in self._loaded)):
                self._restore(self._loaded)
            drawn, values = self.drawn, None
        self._loaded, self._loop, self._drawn_now = None, loop, drawn_now
        changed = self._changed() if values is None else values
        # The program may change them later.
        self._after = tree_map(
            lambda one: cloned(one) if isinstance(one, h.ARRAYS) else one, changed
        )
        self._left_at_first = dict(self._left)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed; raises a CheckpointError if something cannot be carried."""
        return {
            "loop": self._loop,
            "replaced": [
                k for k, v in self._run_state_then.items() if self._run_state.get(k) is not v
            ],
            "values": self._changed(),
            "own": sorted(self._own),
            "stored": self._stored_by_key(),
            "drawn": Packer(self._known).pack(self._drawn_now()),
        }

    def _stored_by_key(self) -> list[list[str]]:
        keys = {place.holder.identity: key for key, place in self._places.items()}
        found = ([keys.get((number, kind), ""), slot] for number, kind, slot in self._stored)
        return sorted(pair for pair in found if pair[0])

    def _note_stored(self, stored: Iterable[tuple[str, str]]) -> None:
        """Record slots that other workers have seen passes write."""
        for key, slot in stored:
            if key in self._places:
                self._stored.add((*self._places[key].holder.identity, slot))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the contents of the program's objects; of some once all frames are known."""
        if self._after is not None and state["loop"] != self._loop:
            # From before `on_begin`, which is not called again.
            state = {**state, "loop": self._loop, "values": self._after}
        self._loaded = state if self._after is None else None
        try:
            self._restore(state)
        except CheckpointError:
            if self.has_all_frames:
                raise

    def _restore(self, state: Mapping[str, Any]) -> None:
        try:
            lost = {*state.get("lost", ())}
            self._apply(state, lambda key: key not in lost)
            for holder, then in self._caches:
                holder.put(then)  # empties a cache that has stored something since
            self.drawn = Unpacker(self._known, torch.device("cpu")).unpack(state["drawn"])
        except _MALFORMED as error:
            raise CheckpointError(
                f"restoring what the program had changed before the checkpoint raised {error!r}: "
                f"resume with the same program, or start a new run."
            ) from error

    def hand_out(self, state: Mapping[str, Any]) -> None:
        """Copy the updating workers' optimizer values to the others, at the end of a loop."""
        values = {k: v for k, v in state["values"].items() if _is_of_optimizer(k)}
        self._apply({**state, "values": values}, only=_is_of_optimizer)

    def compare(self, team: Team, *, have_all: bool = True) -> dict[str, Any] | None:
        """Return what has changed; None if some of it differs between workers. Collective.

        Raises an error for values that may not differ, and for those that cannot be carried.
        Values that only callbacks read may differ, such as times: they are local to each worker
        from then on. Unless all workers `have_all`, only the leader has the optimizer's changes.
        """
        values = changed = self._changed()
        if not have_all:
            values = {k: v for k, v in values.items() if not _is_of_optimizer(k)}
        if team.size == 1:
            return changed
        values = _named(values)
        number = number_of(values)
        votes = None
        while votes is None:
            votes = team.vote(number, "state of the program")
        if len(set(votes.values())) == 1:
            return changed
        packed = {f"{key}\0{slot}": part for key, slot, part in _parts(values)}
        # Workers read different samples, and generators are seeded before each.
        of_passes = {key for key, place in self._places.items() if place.is_read_in_passes}
        packed = {
            part: _undrawn(one) if part.partition("\0")[0] in of_passes else one
            for part, one in packed.items()
        }
        numbers = {part: number_of(one) for part, one in packed.items()}
        mine = [numbers, self._stored_by_key()]
        heard = team.gather(json.dumps(mine).encode(), "state of the program")
        from_all = {rank: json.loads(message) for rank, message in heard.items()}
        for _, stored in from_all.values():
            self._note_stored(stored)  # a worker that has joined has seen fewer passes
        said = {rank: numbers for rank, (numbers, _) in from_all.items()}
        first = min(said)
        for rank, there in said.items():
            for part in {**said[first], **there}:
                if there.get(part) == said[first].get(part):
                    continue
                key, _, slot = part.partition("\0")
                self._own.add(part)
                if (place := self._places.get(key)) is None:
                    continue
                known = [name for name in place.content[0] if _written(place.holder, name) == slot]
                names = known or [h.key_of_name(slot)]
                if slot and self._stored_slots(place, names):
                    continue
                path = place.holder.shown(names[0]) if slot else place.holder.path
                if place.is_read_in_passes:
                    raise _unlike(path, first, rank)
                if isinstance(packed.get(part), Mapping):
                    self._alone.add(path)
        return None

    # What has changed

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = (*self._model.named_parameters(), *self._model.named_buffers())
        return {**dict(state), **{f"optimizer {n}": each for n, each in enumerate(self._more())}}

    def _changed(self) -> dict[str, Any]:
        """Return what differs from the first state, packed."""
        changed: dict[str, tuple[_Place, list[Any], Content]] = {}
        remade: set[int] = set()
        for key in self._unchanged.rest():
            place = self._places[key]
            if has_bits_of(place.holder.owner, place.copy):
                continue
            with suppress(ReferenceError):
                now = place.holder.read()
                if h.same(place.content, now):
                    continue
                if slots := self._kept_slots(place, h.changed_slots(place.content, now), now):
                    changed[key] = place, slots, now
                    if is_value(place.holder.owner):
                        remade.add(id(place.holder.owner))
        if not changed:
            return {}
        if remade:
            self._add_those_that_hold(remade, changed)
        packer = Packer(self._known)
        packed = self._all_packed(packer, changed)
        shared, named = overlapping(packer.spans), packer.named()
        if shared or named:
            packed = self._all_packed(Packer(self._known, shared, named), changed)
        return packed

    def _all_packed(
        self, packer: Packer, changed: Mapping[str, tuple[_Place, list[Any], Content]]
    ) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        # In the same order on every worker: what is packed again refers to its first place.
        for key in sorted(changed, key=self._order):
            place, slots, now = changed[key]
            if not is_value(place.holder.owner):
                packed[key] = self._packed(packer, place, sorted(slots, key=str), now)
        return {key: parts for key, parts in packed.items() if parts}

    def _order(self, key: str) -> tuple[bool, str]:
        """Return where a place comes in packing and unpacking: what passes read is first."""
        return not self._places[key].is_read_in_passes, key

    def _kept_slots(self, place: _Place, slots: list[Any], now: Content) -> list[Any]:
        """Return the slots without those local to a worker, and without what passes store.

        Passes may store a number or a small tensor that the program changes between steps,
        such as a scale that is computed when it is first read: it is kept while all workers have
        the same.
        """
        holder, there = place.holder, dict(h.numbered(now))
        if id(holder.owner) in self._of_model:
            slots = [slot for slot in slots if slot != "training"]  # modes are stored elsewhere
        slots = [
            slot for slot in slots if f"{holder.key}\0{_written(holder, slot)}" not in self._own
        ]
        stored = self._stored_slots(place, slots)
        return [s for s in slots if s not in stored or _is_light(place, there.get(s))]

    def _stored_slots(self, place: _Place, slots: list[Any]) -> set[Any]:
        """Return those slots that passes were seen to write."""
        if not self._stored:
            return set()
        identity, known = place.holder.identity, {*place.content[0]}
        are_new_stored = (*identity, _MORE) in self._stored
        return {
            slot
            for slot in slots
            if (*identity, str(slot)) in self._stored or (are_new_stored and slot not in known)
        }

    def _add_those_that_hold(
        self, remade: set[int], changed: dict[str, tuple[_Place, list[Any], Content]]
    ) -> None:
        """Add the slots with values that can only be rebuilt."""
        num_known = 0
        while num_known < len(remade):  # an iterator may be in another one
            num_known = len(remade)
            for key, place in self._places.items():
                now = place.holder.read()
                of = h.numbered(now)
                slots = [slot for slot, v in of if leads_to(v, lambda one: id(one) in remade)]
                if slots and is_value(place.holder.owner):
                    remade.add(id(place.holder.owner))
                if slots := self._kept_slots(place, slots, now):
                    _, there, _ = changed.get(key, (place, [], now))
                    changed[key] = place, [*dict.fromkeys([*there, *slots])], now

    def _packed(self, packer: Packer, place: _Place, slots: list[Any], now: Content) -> Any:
        holder, (names, values) = place.holder, now
        if holder.kind.opaque is not None:
            if holder.kind is h.MADE_IN_C and self._may_be_left(place, holder.path, holder.owner):
                return {}
            raise self._opaque(place, holder.path, holder.kind.opaque(holder.owner))
        try:
            if holder.kind in (h.CONTENTS, h.DRAWN):
                owner = holder.owner
                if isinstance(owner, np.ndarray) and type(owner) is not np.ndarray:
                    owner = np.array(owner, subok=False)  # its attributes are another place
                return {"contents": packer.pack(owner, inside=True)}
            if holder.kind is h.TABLE:
                there = {name: _in_table(holder.owner, name) for name in slots if name in names}
                return self._slots(packer, place, slots, there)
            if holder.kind in _BY_SLOT:
                there = dict(zip(names, values, strict=True))
                return self._slots(packer, place, slots, there)
            if holder.kind is h.ENTRIES and not self._may_put_back(place):
                there = dict(zip(names, values, strict=True))
                wanted = {h.name_of_key(key): key for key in slots}
                named = {name: there[key] for name, key in wanted.items() if key in there}
                return self._slots(packer, place, [name for name in wanted if name], named)
            if holder.kind is h.ENTRIES:
                return {"content": [[*map(packer.pack, names)], packer.pack(list(values))]}
            return {"content": [None, [packer.pack(value) for value in values]]}
        except Ours:
            return {}
        except (Opaque, RecursionError) as error:
            path = holder.shown(slots[0])
            if holder.is_of_library and self._may_be_left(place, path, holder.owner):
                return {}
            raise self._opaque(place, path, str(error)) from None

    def _slots(
        self, packer: Packer, place: _Place, slots: list[Any], there: Mapping[str, Any]
    ) -> dict[str, Any]:
        packed, gone, rest = {}, [], []
        for slot in slots:
            if slot not in there:
                gone.append(slot)
                continue
            if id(place.holder.owner) in self._saving and type(there[slot]) not in AS_IT_IS:
                rest.append(slot)
                continue
            try:
                packed[slot] = packer.pack(there[slot])
            except Ours:
                rest.append(slot)
            except (Opaque, RecursionError) as error:
                path = place.holder.shown(slot)
                if not self._may_be_left(place, path, there[slot]):
                    raise self._opaque(place, path, str(error)) from None
                rest.append(slot)
        return {"slots": packed, "gone": gone, "rest": rest} if packed or gone or rest else {}

    def _may_be_left(self, place: _Place, path: str, value: Any) -> bool:
        """Return whether a value that cannot be carried may stay local; record it for a notice."""
        if id(place.holder.owner) in self._saving:
            return True
        if isinstance(value, torch.Tensor) or not is_of_a_library(type(value).__module__):
            return False
        is_others = is_of_process(value)
        if not is_others and (place.is_read_in_passes or type(value).__module__ in _OF_PYTHON):
            return False
        self._left[path] = value
        return True

    def left(self) -> list[str]:
        """Return notices about what callbacks and loops have that is not kept, or that differs."""
        kinds = {
            path: f"a {h.name_of(type(value))}"
            for path, value in self._left.items()
            if self._left_at_first.get(path) is not value
        }
        threads = {*threading.enumerate()} - self._threads
        runs = [vars(one).get("_target") or type(one) for one in threads]
        return [
            *(
                _THREAD_LINE.format(getattr(one, "__qualname__", one))
                for one in runs
                if not is_of_a_library(getattr(one, "__module__", None))
            ),
            *(_UNSEEN_LINE.format(path, kind) for path, kind in self._unseen.items()),
            *(_NOT_KEPT_LINE.format(f"`{path}` ({kind})") for path, kind in kinds.items()),
            *(
                _NOT_KEPT_LINE.format(f"what `lru_cache` has stored for `{holder.path}`")
                for holder, then in self._caches
                if not h.same(then, holder.read())
            ),
            *(
                _IMPORTED_LINE.format(name)
                for name in sorted(sys.modules.keys() - self._modules)
                if not is_of_a_library(name)
            ),
            *(_ALONE_LINE.format(path) for path in sorted(self._alone)),
        ]

    def _opaque(self, place: _Place, path: str, kind: str) -> CheckpointError:
        return CheckpointError(
            f"`{path}` has changed between two steps, but {kind} cannot be kept with the run, so a "
            f"worker that joins or a resumed run would lack it: keep plain values, tensors or "
            f"arrays there, or put an object with `state_dict` and `load_state_dict` into "
            f"`run.state`."
        )

    # Putting back

    def _apply(
        self, state: Mapping[str, Any], only: Callable[[str], bool] = lambda key: True
    ) -> None:
        for key in state["replaced"]:  # replaced by other objects than the program's first ones
            value = self._run_state.get(key)
            if value is not None and value is self._run_state_then.get(key):
                # A shallow copy of a tensor would share its memory.
                is_array = isinstance(value, h.ARRAYS)
                self._run_state[key] = cloned(value) if is_array else copied(value)
        values, device = state["values"], next(self._model.parameters()).device
        self._own |= set(state["own"])
        self._note_stored(state.get("stored", ()))
        unpacker = Unpacker(self._known, device)
        wanted = {}
        for key in sorted(self._places, key=self._order):
            place = self._places[key]
            is_put = not is_value(place.holder.owner) and place.holder.kind.opaque is None
            if is_put and only(key):
                with suppress(ReferenceError):
                    wanted[key] = self._wanted(place, values.get(key), unpacker)
        for key in (key for key in self._places if key in wanted):
            (content, copy), holder = wanted[key], self._places[key].holder
            if holder.kind is h.DRAWN:
                if copy is not None:
                    set_state(holder.owner, copy)
            elif holder.kind is h.CONTENTS:
                if copy is not None and not h.same(content or ((), ()), holder.read()):
                    fill(holder.owner, copy)
                    if isinstance(copy, torch.Tensor) and holder.owner.is_leaf:
                        holder.owner.requires_grad_(copy.requires_grad)
            elif content is not None:
                holder.put(content)

    def _wanted(self, place: _Place, packed: Any, unpacker: Unpacker) -> tuple[Content | None, Any]:
        """Return the content that a place should have: the first one, with later changes."""
        holder = place.holder
        if holder.kind in (h.CONTENTS, h.DRAWN):
            if packed is not None:
                return None, unpacker.unpack(packed["contents"])
            return place.content, place.copy if self._may_put_back(place) else None
        held = holder.read()
        now = dict(h.numbered(held))
        is_by_slot = holder.kind in (*_BY_SLOT, h.TABLE)
        if holder.kind is h.ENTRIES:
            is_by_slot = not self._may_put_back(place) or "slots" in (packed or ())
        if is_by_slot:
            then = dict(h.numbered(place.content))
            if holder.kind is h.TABLE:  # its first tensors are stored elsewhere
                then = {name: now.get(name, place.copy[name]) for name in then}
            packed = packed or {"slots": {}, "gone": [], "rest": []}
            if holder.kind is h.ENTRIES:
                packed = {
                    "slots": {h.key_of_name(n): part for n, part in packed["slots"].items()},
                    "gone": [*map(h.key_of_name, packed["gone"])],
                    "rest": [*map(h.key_of_name, packed["rest"])],
                }
            is_saved = id(holder.owner) in self._saving  # except for what its own state omits
            keeps = {*self._kept_slots(place, [*now], held)}
            mine = {
                n
                for n in now
                if n in packed["rest"]
                or n not in keeps
                or (is_saved and n not in packed["slots"] and not self._may_forget(then, now, n))
            }
            kept = {name: now[name] for name in now if name in mine}
            wanted = {n: value for n, value in then.items() if n not in kept} | kept
            theirs = {n: part for n, part in packed["slots"].items() if n not in kept}
            wanted |= {n: unpacker.unpack(part) for n, part in theirs.items()}
            for name in packed["gone"]:
                if name not in kept:
                    wanted.pop(name, None)
            return (tuple(wanted), tuple(wanted.values())), None
        if not self._may_put_back(place) and (packed is None or holder.kind is not h.CONTEXT):
            return None, None
        if packed is None:
            return place.content, None
        names, values = packed["content"]
        if names is None:
            return ((), tuple(unpacker.unpack(part) for part in values)), None
        keys = tuple(unpacker.unpack(name) for name in names)
        return (keys, tuple(unpacker.unpack(values))), None

    def _may_forget(self, then: Mapping[Any, Any], now: Mapping[Any, Any], name: Any) -> bool:
        """Return whether what an object's own state may lack has its first value, as it had then.

        What its `load_state_dict` creates in another process, such as a mark, stays.
        """
        is_of_then = name in then or self._after is not None
        return is_of_then and type(then.get(name, now[name])) in PLAIN

    def _may_put_back(self, place: _Place) -> bool:
        identity = place.holder.identity
        return not any(stored[:2] == identity for stored in self._stored)


def _saves_itself(one: Any) -> bool:
    """Return whether an object has a `load_state_dict`, other than that of a class of ours."""
    load: Any = getattr(one, "load_state_dict", None)
    return load is not None and not str(getattr(load, "__module__", "")).startswith("unisono.")


def _of_names(
    content: Content, now: Content, known: Collection[str], names: Collection[str]
) -> Content:
    """Return the first content under the `names` that count now; new names have their value now.

    In the order of the walk of now, which may reach the program's code in another order.
    """
    there, before = dict(zip(*now, strict=True)), dict(zip(*content, strict=True))
    then = {
        name: before.get(name, value)
        for name, value in there.items()
        if name in before or bare(name) not in known
    }
    gone = (name for name in before if name not in there and bare(name) in names)
    then |= {name: before[name] for name in gone}
    return tuple(then), tuple(then.values())


def _written(holder: Holder, slot: Any) -> str:
    """Return how a slot is written in a packed state."""
    return h.name_of_key(slot) if holder.kind is h.ENTRIES else str(slot)


def _is_light(place: _Place, value: Any) -> bool:
    """Return whether a value that passes have stored can be kept with the run.

    Texts are not: a path or a name may be of this process alone.
    """
    if len(place.content[1]) > _FEW or place.holder.kind not in (*_BY_SLOT, h.ENTRIES, h.CONTEXT):
        return False
    if isinstance(value, h.ARRAYS):
        return value.nbytes <= _SMALL
    return value is None or isinstance(value, (int, float, complex))


def _copy(account: Account, holder: Holder) -> Any:
    """Return a copy of a generator, a tensor or an array, or a layer's first tensors by name."""
    if holder.kind is h.TABLE:
        return {name: _in_table(holder.owner, name) for name in holder.read()[0]}
    return copy_of(holder.owner) if holder.kind is h.DRAWN else account.copy(holder)


def _in_table(layer: nn.Module, name: str) -> Any:
    table, _, name = name.partition(".")
    return vars(layer)[table][name]


def _is_of_optimizer(key: str) -> bool:
    return key.partition(" ")[2].startswith(OPTIMIZER)


def _parts(values: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    for key, packed in values.items():
        if "slots" in packed:
            yield from ((key, name, part) for name, part in packed["slots"].items())
            yield from ((key, name, "gone") for name in packed["gone"])
        else:
            yield key, "", packed


def _named(packed: Any, path: str = "", names: dict[int, str] | None = None) -> Any:
    """Name packed objects by their first places: their numbers count what cannot be packed, too."""
    names = {} if names is None else names
    if isinstance(packed, list):
        return [
            _named(one, f"{path}.{at}", names) if isinstance(one, (dict, list)) else one
            for at, one in enumerate(packed)
        ]
    if not isinstance(packed, dict):
        return packed
    if packed.get("@") == "again":
        return {"@": "again", "n": names.get(packed["n"], "")}
    if "@" in packed and "n" in packed:
        names[packed["n"]] = path
        packed = {**packed, "n": ""}
    return {key: _named(part, f"{path}.{key}", names) for key, part in packed.items()}


def _undrawn(packed: Any) -> Any:
    """Return packed values without the positions of random generators."""
    if isinstance(packed, list):
        return [*map(_undrawn, packed)]
    if not isinstance(packed, dict):
        return packed
    if packed.get("@") in ("random", "generator", "bits", "legacy"):
        return {"@": packed["@"]}
    return {key: _undrawn(part) for key, part in packed.items()}


def _unlike(path: str, first: int, rank: int) -> MismatchError:
    return MismatchError(
        f"`{path}` differs between ranks {first} and {rank}, but what passes read must be the same "
        f"on every worker: set it on every worker, from values that all of them have, such as "
        f"`step.means`, and draw with the default generators, which are seeded alike."
    )
