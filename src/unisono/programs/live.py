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
import re
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from unisono.programs.frames import KeptFrame
from unisono.programs.iterators import is_iterator

# One instruction may store a variable and load another: `STORE_FAST_LOAD_FAST` (Python 3.13).
_OF_VARIABLES = re.compile(
    r"(LOAD|STORE|DELETE)_(?:FAST|NAME|GLOBAL|DEREF|CLOSURE|CLASSDEREF|FROM_DICT_OR_\w+)"
)
_COLLECTS = ("LIST_APPEND", "SET_ADD", "MAP_ADD")
_PARTS = 16  # of a `zip`
_STORES = {number for name, number in dis.opmap.items() if name.startswith("STORE")}
_SETS = (dis.opmap["STORE_ATTR"], dis.opmap["DELETE_ATTR"])
_CACHE, _GET_ITER = dis.opmap["CACHE"], dis.opmap["GET_ITER"]
_OF_STACK = ("POP_TOP", "SWAP", "END_FOR", "POP_ITER", "NOP", "COPY", "PUSH_NULL")
_ENDS = ("RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE")


def variables_of(frame: KeptFrame) -> dict[str, Any]:
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


@functools.lru_cache(maxsize=4096)
def names_set_by(code: CodeType) -> frozenset[str]:
    """Return the names of attributes that code, including inner functions, may set or delete.

    Includes strings, as in `setattr(settings, "rate", 1.0)`.
    """
    found, raw, more = set[str](), code.co_code, 0
    for at in range(0, len(raw), 2):
        number = raw[at + 1] | more << 8
        more = number if raw[at] == dis.EXTENDED_ARG else 0
        if raw[at] in _SETS:
            found.add(code.co_names[number])
    if not {"setattr", "delattr"}.isdisjoint(code.co_names):
        found |= {one for one in code.co_consts if isinstance(one, str) and one.isidentifier()}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(found.union(*map(names_set_by, inner)))


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
    found, inner, seen = list[str](), [steps], {id(steps)}
    while inner:
        # One at a time: a tuple of several arguments would also refer to them.
        outer = [one for each in inner for one in gc.get_referrers(each) if is_iterator(one)]
        inner = [one for one in outer if type(one) is not tuple or len(one) < _PARTS]
        inner = [one for one in inner if id(one) not in seen]
        seen.update(map(id, inner))
        kinds = (type(one) for one in inner if type(one) not in (tuple, map, filter))
        found.extend(kind.__name__ for kind in kinds)
    return found


@functools.lru_cache(maxsize=1024)
def begin_of_instruction(code: CodeType, lasti: int) -> int:
    """Return where the instruction begins that a frame is at, which may be within its caches."""
    offsets = [each.offset for each in dis.get_instructions(code)]
    return max((offset for offset in offsets if offset <= lasti), default=0)


def frames_of_loop(taking: FrameType, asking: FrameType | None) -> list[FrameType]:
    """Return the frames from the one that takes the steps to the one that requested them.

    If that one has returned the steps, it is the one that takes them.
    """
    frames, frame = list[FrameType](), taking
    while frame is not asking and frame.f_back is not None:
        frames.append(frame)
        frame = frame.f_back
    return [*frames, frame] if frame is asking else [taking]


def takers_of(frame: FrameType) -> list[FrameType]:
    """Return the frames that take what a generator yields, if the frame is that of one."""
    frames, flags = list[FrameType](), inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    while frame.f_code.co_flags & flags and frame.f_back is not None:
        frame = frame.f_back
        frames.append(frame)
    return frames


def has_stored(frame: KeptFrame | None, since: int) -> bool:
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
    at = {each.offset: each for each in dis.get_instructions(code)}
    here = at[begin_of_instruction(code, lasti)]
    is_whole = not code.co_name.startswith("<") or code.co_name == "<module>"
    is_loop = here.opname == "FOR_ITER" and not _collects([*at.values()], here)
    return is_whole and (is_loop or "next" in code.co_names)


def _collects(instructions: Sequence[dis.Instruction], loop: dis.Instruction) -> bool:
    """Return whether a loop is that of a comprehension, which is part of the code around it.

    So it is since Python 3.12 (PEP 709). A comprehension of n loops adds to what is n + 1 below
    the top of the stack.
    """
    loops = [each for each in instructions if each.opname == "FOR_ITER"]
    for each in instructions:
        depth = each.arg or 0
        if each.opname in _COLLECTS and depth > 1:  # otherwise a display such as `[*rows, row]`
            around = [one for one in loops if one.offset < each.offset < one.argval]
            if loop in around[1 - depth :]:
                return True
    return False


def goes_elsewhere(frame: FrameType) -> bool:
    """Return whether a frame drops a loop's iterator to go elsewhere than where the loop ends.

    So does a `return` within a loop, and a `break` past its `else`.
    """
    return _goes_elsewhere(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _goes_elsewhere(code: CodeType, lasti: int) -> bool:
    instructions = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(instructions)}
    here = at[begin_of_instruction(code, lasti)]
    around = [
        each
        for each in instructions
        if each.opname == "FOR_ITER" and each.offset < lasti < each.argval
    ]
    if not around or instructions[here].opname != "POP_TOP":
        return False
    # A `return` drops the iterators of loops within this one first.
    statement = instructions[here].positions
    dropped = [each for each in instructions[:here] if each.positions == statement]
    inner = [each.opname for each in dropped].count("POP_TOP")
    end = at[around[max(0, len(around) - 1 - inner)].argval]
    returned = _returned(instructions, here + 1)
    if returned is None:
        return _next(instructions, here + 1) != _next(instructions, end)
    if instructions[here - 1].opname == "SWAP":  # with a value, which was computed before
        value = instructions[here - 2 - 2 * inner]
        returned = [value.argval if value.opname.startswith("LOAD") else value, *returned]
    return returned != _returned(instructions, end)


def _next(instructions: Sequence[dis.Instruction], index: int) -> int:
    """Return where the next instruction begins that does more than to jump or to tidy the stack."""
    at = {each.offset: number for number, each in enumerate(instructions)}
    while (each := instructions[index]).opname in _OF_STACK or each.opname.startswith("JUMP_"):
        if each.opname.startswith("JUMP_"):
            if "IF" in each.opname:
                break
            index = at[each.argval]
        else:
            index += 1
    return each.offset


def _returned(instructions: Sequence[dis.Instruction], index: int) -> list[Any] | None:
    """Return what is done from an instruction on until a frame returns; None: that depends."""
    done = list[Any]()
    for each in instructions[index:]:
        if each.opname in ("RETURN_VALUE", "RETURN_CONST"):
            return done + [each.argval] * (each.opname == "RETURN_CONST")
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            return None
        if each.opname.startswith("LOAD"):  # of which there are several
            done.append(each.argval)
        elif each.opname not in _OF_STACK:
            done.append(each.opname)
    return None


def live_variables(frame: KeptFrame) -> frozenset[str]:
    """Return the names of variables that may be read before they are set again."""
    return _live_and_set(frame.f_code, frame.f_lasti)[0]


def set_before_read(frame: KeptFrame) -> frozenset[str]:
    """Return the names of variables that will only be read after they are set again."""
    live, are_set = _live_and_set(frame.f_code, frame.f_lasti)
    return are_set - live


@functools.lru_cache(maxsize=256)
def _live_and_set(code: CodeType, lasti: int) -> tuple[frozenset[str], frozenset[str]]:
    instructions = list(dis.get_instructions(code))
    at = {each.offset: index for index, each in enumerate(instructions)}
    bytecode: Any = dis.Bytecode(code)
    handlers = [  # no instruction jumps there
        one for one in bytecode.exception_entries if not _is_of_python(instructions, at[one.target])
    ]
    live, are_set, outer = set[str](), set[str](), _read_outside(code)
    waiting = [(at[begin_of_instruction(code, lasti)], frozenset[str]())]
    seen: dict[int, frozenset[str]] = {}
    while waiting:
        index, written = waiting.pop()
        while index < len(instructions):
            before = seen.get(index)
            if before is not None and before <= written:
                break  # nothing new can be read from here
            seen[index] = written if before is None else before & written
            each = instructions[index]
            waiting += [
                (at[one.target], written) for one in handlers if one.start <= each.offset < one.end
            ]
            for name, is_read in _variables_in(each):
                if not is_read:
                    written |= {name}
                    are_set.add(name)
                elif name not in written:
                    live.add(name)
            if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
                waiting.append((at[each.argval], written))
                if each.opname.startswith("JUMP") and "IF" not in each.opname:
                    break
            if each.opname in _ENDS:
                live |= outer - written
                break
            index += 1
    return frozenset(live | _read_by_inner(code)), frozenset(are_set)


def _is_of_python(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """Return whether a handler is that of each generator for StopIteration (since Python 3.12)."""
    return instructions[index].opname == "CALL_INTRINSIC_1"


def may_set(frame: KeptFrame, name: str) -> bool:
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


def _variables_in(each: dis.Instruction) -> Iterator[tuple[str, bool]]:
    """Yield the variables that an instruction uses, in order, and whether it reads them."""
    uses = _OF_VARIABLES.findall(each.opname)
    names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
    for use, name in zip(uses, names, strict=False):
        yield name, use == "LOAD"


def _read_outside(code: CodeType) -> frozenset[str]:
    """Return the names of variables that code shares with outer functions, or sets in its module.

    Others may read them once it has ended.
    """
    each = dis.get_instructions(code)
    return frozenset({*code.co_freevars, *(i.argval for i in each if i.opname == "STORE_GLOBAL")})


def _read_by_inner(code: CodeType) -> set[str]:
    """Return the names that inner functions and comprehensions read: they may run at any time."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= {*constant.co_freevars, *constant.co_names} | _read_by_inner(constant)
    return found
