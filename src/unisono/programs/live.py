"""Which variables of a frame does the rest of its code need?

A variable that is always set before it is read need not be stored. The analysis follows all
instructions that may run next, from the current one on (live variable analysis; Aho, Lam, Sethi,
Ullman: Compilers, section 9.2.5).
"""

from __future__ import annotations

import dis
import functools
import gc
import inspect
from types import CodeType, FrameType
from typing import Any

from unisono.programs.holders import is_iterator

_READS: tuple[str, ...] = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE")
_READS += ("LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_WRITES: tuple[str, ...] = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_WRITES += ("DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "DELETE_DEREF")
_PARTS = 16  # of a `zip`
_STORES = {number for name, number in dis.opmap.items() if name.startswith("STORE")}
_CACHE, _GET_ITER = dis.opmap["CACHE"], dis.opmap["GET_ITER"]
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the existing variables that a frame's code names, by name."""
    there = {**frame.f_globals, **frame.f_locals}
    code = frame.f_code
    names = {*names_in(code), *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return {name: there[name] for name in sorted(names & there.keys())}


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names that code, including inner functions, may use from globals or modules.

    Includes strings, as in `globals()["rate"]`, `getattr(settings, "rate")` and
    `import_module("mine.settings")`.
    """
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= names_in(constant)
        elif isinstance(constant, str):
            words = constant.replace(":", ".").split(".")
            if all(map(str.isidentifier, words)):
                found |= {*constant.split(":"), *words}
    return frozenset(found)


def orders_by_hash(code: CodeType) -> bool:
    """Return whether code creates sets or uses hashes."""
    makes_sets = any(each.opname == "BUILD_SET" for each in dis.get_instructions(code))
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    by_name = {"hash", "set", "frozenset"} & {*code.co_names}
    return makes_sets or bool(by_name) or any(map(orders_by_hash, inner))


def is_looped_over(frame: FrameType) -> bool:
    """Return whether a `for` takes what the frame's current instruction returns, with no iterator
    around it."""
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while code[at] == _CACHE:
        at += 2
    return code[at] == _GET_ITER


def iterators_around(steps: Any) -> list[str]:
    """Return the names of builtin iterators around a generator that count, such as `enumerate`."""
    found, inner = list[str](), [steps]
    while inner:
        outer = [one for one in gc.get_referrers(*inner) if is_iterator(one)]
        inner = [one for one in outer if type(one) is not tuple or len(one) < _PARTS]
        kinds = (type(one) for one in inner if type(one) not in (tuple, map, filter))
        found.extend(kind.__name__ for kind in kinds)
    return found


def frames_of_loop(taking: FrameType, asking: FrameType) -> list[FrameType]:
    """Return the frames from the one that takes the steps to the one that requested them.

    If that one has returned the steps, it is the one that takes them.
    """
    frames, frame = list[FrameType](), taking
    while frame is not asking and frame.f_back is not None:
        frames.append(frame)
        frame = frame.f_back
    return [*frames, asking] if frame is asking else [taking]


def takers_of(frame: FrameType) -> list[FrameType]:
    """Return the frames that take what a generator yields, if the frame is that of one."""
    frames, flags = list[FrameType](), inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    while frame.f_code.co_flags & flags and frame.f_back is not None:
        frame = frame.f_back
        frames.append(frame)
    return frames


def has_stored(frame: FrameType | None, since: int) -> bool:
    """Return whether a frame may have set variables since it was at an instruction."""
    if frame is None:
        return False
    done = frame.f_code.co_code[since : frame.f_lasti : 2]
    return frame.f_lasti < since or not _STORES.isdisjoint(done)


def takes_in_a_loop(frame: FrameType) -> bool:
    """Return whether a frame takes its next step by `for` or `next` and stores it in variables."""
    return _takes_in_a_loop(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _takes_in_a_loop(code: CodeType, lasti: int) -> bool:
    at = {each.offset: each.opname for each in dis.get_instructions(code)}
    opname = at[max((offset for offset in at if offset <= lasti), default=0)]
    is_whole = not code.co_name.startswith("<") or code.co_name == "<module>"
    return is_whole and (opname == "FOR_ITER" or "next" in code.co_names)


def live_variables(frame: FrameType) -> frozenset[str]:
    """Return the names of variables that may be read before they are set again."""
    return _live_and_set(frame.f_code, frame.f_lasti)[0]


def set_before_read(frame: FrameType) -> frozenset[str]:
    """Return the names of variables that will only be read after they are set again."""
    live, are_set = _live_and_set(frame.f_code, frame.f_lasti)
    return are_set - live


@functools.lru_cache(maxsize=256)
def _live_and_set(code: CodeType, lasti: int) -> tuple[frozenset[str], frozenset[str]]:
    instructions = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(instructions)}
    bytecode: Any = dis.Bytecode(code)
    handlers = bytecode.exception_entries  # no instruction jumps there
    live, are_set = set[str](), set[str]()
    # The frame may be at an instruction's caches, which are not listed.
    here = max((offset for offset in at if offset <= lasti), default=0)
    waiting = [(at[here], frozenset[str]())]
    seen: dict[int, frozenset[str]] = {}
    while waiting:
        index, written = waiting.pop()
        while index < len(instructions):
            before = seen.get(index)
            if before is not None and before <= written:
                break  # nothing new can be read from here
            seen[index] = written if before is None else before & written
            each = instructions[index]
            names = _names_of(each)
            waiting += [
                (at[one.target], written) for one in handlers if one.start <= each.offset < one.end
            ]
            if each.opname.startswith(_READS):
                live |= {name for name in names if name not in written}
            elif each.opname.startswith(_WRITES):
                written |= frozenset(names)
                are_set.update(names)
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                waiting.append((at[each.argval], written))
                if each.opname.startswith("JUMP") and "IF" not in each.opname:
                    break
            if each.opname in _ENDS:
                break
            index += 1
    return frozenset(live | _read_by_inner(code)), frozenset(are_set)


def may_set(frame: FrameType, name: str) -> bool:
    """Return whether a variable that a frame shares with inner functions may be set again."""
    return _may_set(frame.f_code, frame.f_lasti, name)


@functools.lru_cache(maxsize=256)
def _may_set(code: CodeType, lasti: int, name: str) -> bool:
    each = list(dis.get_instructions(code))
    back = [one.argval for one in each if one.offset >= lasti and "BACKWARD" in one.opname]
    begin = min([lasti, *back])  # of the outermost loop around it
    return any(one.offset >= begin and _sets(one, name) for one in each) or any(
        _sets_outer(one, name) for one in code.co_consts if isinstance(one, CodeType)
    )


def _sets_outer(code: CodeType, name: str) -> bool:
    """Return whether code, or a function in it, sets a variable of an outer function."""
    return name in code.co_freevars and (
        any(_sets(one, name) for one in dis.get_instructions(code))
        or any(_sets_outer(one, name) for one in code.co_consts if isinstance(one, CodeType))
    )


def _sets(each: dis.Instruction, name: str) -> bool:
    return each.opname in ("STORE_DEREF", "DELETE_DEREF") and each.argval == name


def _names_of(each: dis.Instruction) -> tuple[str, ...]:
    value = each.argval
    return value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()


def _read_by_inner(code: CodeType) -> set[str]:
    """Return the names that inner functions and comprehensions read: they may run at any time."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= {*constant.co_freevars, *constant.co_names} | _read_by_inner(constant)
    return found
