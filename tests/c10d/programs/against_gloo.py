"""Every collective on gloo and on unisono, with the same inputs: the same bits.

Arguments: rank, world size, file for the rendezvous. Float sums of three ranks and more are
compared with the canonical tree instead, as gloo's order depends on the place in the buffer.
"""

import itertools
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from unisono.plan.summation import tree_sum

OP = dist.ReduceOp
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALONE = [torch.int16, torch.uint16, torch.float8_e4m3fn]  # moved by unisono, not by gloo
NUMBERS = [OP.SUM, OP.MIN, OP.MAX, OP.PRODUCT]
BITS = [OP.BAND, OP.BOR, OP.BXOR]
LARGE = 2_500_001  # elements: more than one chunk for two ranks, and than a slot for three


def newer(module, new, old):
    return getattr(module, new, None) or getattr(module, old)


all_gather_single = newer(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = newer(dist, "reduce_scatter_single", "reduce_scatter_tensor")
functional_all_gather = newer(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = newer(functional, "reduce_scatter_single", "reduce_scatter_tensor")

rank, world_size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SIZES = [0, 1, 7, 1000, 70_003] if world_size == 2 else [7, 70_003]  # gloo is slow with three
checks = 0


def value(dtype, size, owner, seed=0):
    generator = torch.Generator().manual_seed(seed * 1000 + owner * 100 + size % 97)
    if dtype.is_floating_point or dtype.is_complex:
        base = torch.randn(size, generator=generator)
        return base.to(dtype) if not dtype.is_complex else torch.complex(base, base.flip(0))
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()
    return torch.randint(0, 100, (size,), generator=generator).to(dtype)


def bits(tensor):
    raw = tensor.contiguous().view(-1).view(torch.uint8)
    return raw != 0 if tensor.dtype is torch.bool else raw  # gloo's True + True is stored as 2


def same(name, one, other):
    global checks
    checks += 1
    one, other = (x if isinstance(x, list) else [x] for x in (one, other))
    assert len(one) == len(other), name
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape, name
        assert a.dtype == b.dtype, name
        assert torch.equal(bits(a), bits(b)), f"rank {rank}: {name}: {a} is not {b}"


def on_both(name, act):
    """Run `act(group)` on both backends; it returns what it has filled."""
    same(name, act(ours), act(gloo))


def tree(op, values):
    if op == OP.PRODUCT:
        return tree_sum(values, torch.mul)
    total = tree_sum(values, torch.add)
    return total / world_size if op == OP.AVG else total


def reductions():
    table = [
        *itertools.product(NUMBERS + BITS, [*INTEGERS, torch.bool], SIZES),
        *itertools.product([*NUMBERS, OP.AVG], FLOATS, SIZES),
        *itertools.product([OP.SUM], [torch.complex64, torch.float32], [7, LARGE]),
        *itertools.product([OP.AVG, OP.MAX], [torch.float32], [LARGE]),
    ]
    for op, dtype, size in table:
        name = f"{op} {dtype} {size}"
        is_exact = op not in (OP.SUM, OP.PRODUCT, OP.AVG) or dtype in (*INTEGERS, torch.bool)
        mine = value(dtype, size, rank)

        def act(group, op=op, mine=mine):
            result = mine.clone()
            dist.all_reduce(result, op, group=group)
            return result

        if world_size == 2 or is_exact:
            on_both(f"all_reduce {name}", act)
        if not is_exact:
            everybody = [value(dtype, size, owner) for owner in range(world_size)]
            same(f"all_reduce {name}", act(ours), tree(op, everybody))
        if size in (7, 70_003) and not dtype.is_complex:
            result = mine.clone()
            dist.reduce(result, world_size - 1, op, group=ours)
            total = act(ours)
            same(f"reduce {name}", result, total if rank == world_size - 1 else mine)
            everybodys = [value(dtype, size, rank, seed) for seed in range(world_size)]
            ours_part, parts = torch.empty_like(mine), [v.clone() for v in everybodys]
            dist.reduce_scatter(ours_part, parts, op, group=ours)
            single = torch.empty_like(mine)
            reduce_scatter_single(single, torch.cat(everybodys), op, group=ours)
            same(f"reduce_scatter {name}", ours_part, single)
            whole = torch.cat(everybodys)
            dist.all_reduce(whole, op, group=ours)
            same(f"reduce_scatter {name}", single, whole.view(world_size, -1)[rank])


def averages_of_integers():
    """gloo has none: in every form of a reduction they are the sums, divided towards zero."""
    for dtype, size in itertools.product(INTEGERS, SIZES):
        name = f"AVG {dtype} {size}"
        shift = 50 if dtype.is_signed else 0
        values = [value(dtype, size, owner) - shift for owner in range(world_size)]
        total = torch.stack(values).to(torch.int64).sum(0)
        mean = total.div(world_size, rounding_mode="trunc").to(dtype)
        for is_async in (False, True):
            result = values[rank].clone()
            work = dist.all_reduce(result, OP.AVG, group=ours, async_op=is_async)
            if is_async:
                work.wait()
            same(f"all_reduce {name}", result, mean)
        result = values[rank].clone()
        dist.reduce(result, 0, OP.AVG, group=ours)
        same(f"reduce {name}", result, mean if rank == 0 else values[rank])
        whole, part = values[rank].repeat(world_size), torch.empty_like(mean)
        reduce_scatter_single(part, whole, OP.AVG, group=ours)
        same(f"reduce_scatter {name}", part, mean)
        dist.reduce_scatter(part.zero_(), list(whole.chunk(world_size)), OP.AVG, group=ours)
        same(f"reduce_scatter of a list {name}", part, mean)
        same(f"functional {name}", functional.all_reduce(values[rank], "avg", ours).wait(), mean)
        single = functional_reduce_scatter(whole, "avg", 0, ours).wait()
        same(f"functional reduce_scatter {name}", single, mean)
        pair = functional.all_reduce_coalesced([values[rank]] * 2, "avg", ours)
        same(f"coalesced {name}", [one.wait() for one in pair], [mean, mean])


def moves():
    for dtype, size in itertools.product([*INTEGERS, *FLOATS, torch.bool, torch.complex64], SIZES):
        name = f"{dtype} {size}"
        mine = value(dtype, size, rank)

        def broadcast(group, mine=mine):
            result = mine.clone()
            dist.broadcast(result, world_size - 1, group=group)
            return result

        def all_gather(group, mine=mine):
            outputs = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(outputs, mine, group=group)
            return outputs

        def gather(group, mine=mine):
            outputs = [torch.empty_like(mine) for _ in range(world_size)] if rank == 0 else None
            dist.gather(mine, outputs, 0, group=group)
            return outputs or []

        def scatter(group, mine=mine, size=size, dtype=dtype):
            inputs = [value(dtype, size, r, 5) for r in range(world_size)] if rank == 1 else None
            output = torch.empty_like(mine)
            dist.scatter(output, inputs, 1, group=group)
            return output

        def all_to_all(group, size=size, dtype=dtype):
            given = [value(dtype, size, rank, seed) for seed in range(world_size)]
            output = torch.empty_like(torch.cat(given))
            dist.all_to_all_single(output, torch.cat(given), group=group)
            return output

        from_all = [value(dtype, size, owner) for owner in range(world_size)]
        to_me = [value(dtype, size, owner, rank) for owner in range(world_size)]
        expected = {
            broadcast: from_all[-1],
            all_gather: from_all,
            gather: from_all if rank == 0 else [],
            scatter: value(dtype, size, rank, 5),
            all_to_all: torch.cat(to_me),
        }
        for act, result in expected.items():
            same(f"{act.__name__} {name}", act(ours), result)
            if not dtype.is_complex:  # gloo cannot
                same(f"gloo's {act.__name__} {name}", act(gloo), result)
        single = torch.empty_like(torch.cat([mine] * world_size))
        if not dtype.is_complex:
            all_gather_single(single, mine, group=ours)
            same(f"all_gather_single {name}", single, torch.cat(all_gather(ours)))
    for dtype in ALONE:
        mine = torch.arange(9).to(dtype)
        result = mine.clone() if rank == 0 else torch.zeros(9).to(dtype)
        dist.broadcast(result, 0, group=ours)
        same(f"broadcast {dtype}", result, mine)


def uneven():
    sizes = [3 + 40_000 * owner for owner in range(world_size)]
    outputs = [torch.empty(size) for size in sizes]
    dist.all_gather(outputs, value(torch.float32, sizes[rank], rank), group=ours)
    expected = [value(torch.float32, size, owner) for owner, size in enumerate(sizes)]
    same("uneven all_gather", outputs, expected)

    inputs = [[value(torch.float32, n, owner, 3) for n in sizes] for owner in range(world_size)]
    output = torch.empty(sizes[rank])
    dist.reduce_scatter(output, inputs[rank], group=ours)
    same("uneven reduce_scatter", output, tree_sum([row[rank] for row in inputs], torch.add))

    given = [40_000 * (rank + 1) * (other + 2) for other in range(world_size)]
    taken = [40_000 * (other + 1) * (rank + 2) for other in range(world_size)]

    def all_to_all_single(group):
        output = torch.zeros(sum(taken), 5)
        tensor = value(torch.float32, sum(given) * 5, rank).view(-1, 5)
        dist.all_to_all_single(output, tensor, taken, given, group=group)
        return output

    on_both("uneven all_to_all_single", all_to_all_single)
    # Rank 0 gives and takes equal parts, the others do not.
    given = [2 if 0 in (rank, other) else rank + other for other in range(world_size)]
    taken = given
    on_both("all_to_all_single that is even on one rank", all_to_all_single)
    given = [(rank + 1) * (other + 2) for other in range(world_size)]
    taken = [(other + 1) * (rank + 2) for other in range(world_size)]
    outputs = [torch.zeros(n) for n in taken]
    inputs = [value(torch.float32, n, rank, 9) for n in given]
    dist.all_to_all(outputs, inputs, group=ours)
    expected = [value(torch.float32, n, owner, 9) for owner, n in enumerate(taken)]
    same("uneven all_to_all", outputs, expected)


def layouts():
    base = value(torch.float32, 60_000, rank).view(200, 300)

    def transposed(group):
        tensor = base.clone().t()
        dist.all_reduce(tensor, group=group)
        return tensor

    tensor = base.clone()
    dist.broadcast(tensor[:, ::3], 1, group=ours)
    expected = base.clone()
    expected[:, ::3] = value(torch.float32, 60_000, 1).view(200, 300)[:, ::3]
    same("broadcast of a strided tensor", tensor, expected)
    everybody = [value(torch.float32, 60_000, r).view(200, 300) for r in range(world_size)]
    same("transposed", transposed(ours), tree_sum(everybody, torch.add).t())
    output = torch.empty(300, world_size).t()
    all_gather_single(output, base[0], group=ours)
    same("all_gather into a transposed tensor", output, torch.stack([x[0] for x in everybody]))
    parameter = torch.nn.Parameter(base.clone())
    dist.all_reduce(parameter, group=ours)
    same("a parameter", parameter.detach(), tree_sum(everybody, torch.add))


def whatever_the_cut():
    """One all_reduce of the whole and many of odd pieces of it: the same bits."""
    for dtype, op in itertools.product(FLOATS[:3], [OP.SUM, OP.AVG, OP.PRODUCT]):
        whole = value(dtype, 300_007, rank)
        pieces = whole.clone()
        dist.all_reduce(whole, op, group=ours)
        for piece in pieces.split(12_345):
            dist.all_reduce(piece, op, group=ours)
        same(f"whatever the cut {dtype} {op}", whole, pieces)


def forms():
    """Asynchronous, coalesced and functional calls, and objects."""
    mine = value(torch.float32, 1001, rank)
    total = tree_sum([value(torch.float32, 1001, r) for r in range(world_size)], torch.add)

    tensor = mine.clone()
    work = dist.all_reduce(tensor, group=ours, async_op=True)
    assert work.wait()
    assert work.is_completed()
    same("asynchronous", work.get_future().wait()[0], total)
    with dist.distributed_c10d._coalescing_manager(group=ours, async_ops=True) as manager:
        several = [mine.clone(), mine.clone()]
        for one in several:
            dist.all_reduce(one, group=ours)
    manager.wait()
    same("coalesced", several, [total, total])
    outputs = [torch.empty(world_size * 1001) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(group=ours):
        for output in outputs:
            all_gather_single(output, mine, group=ours)
    parts = [torch.empty(1001) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(group=ours):
        for part, output in zip(parts, outputs, strict=True):
            reduce_scatter_single(part, output, group=ours)
    same(
        "coalesced parts",
        parts,
        [tree(OP.SUM, [value(torch.float32, 1001, rank)] * world_size)] * 2,
    )

    same("functional", functional.wait_tensor(functional.all_reduce(mine, "sum", ours)), total)
    gathered = functional_all_gather(mine, 0, ours).wait()
    same(
        "functional all_gather",
        gathered,
        torch.cat([value(torch.float32, 1001, r) for r in range(world_size)]),
    )
    scattered = functional_reduce_scatter(gathered, "sum", 0, ours).wait()
    same("functional reduce_scatter", scattered, parts[0])
    both = functional.all_reduce_coalesced([mine, mine], "sum", ours)
    same("functional all_reduce_coalesced", [one.wait() for one in both], [total, total])
    back = functional.all_to_all_single(gathered, None, None, ours).wait()
    same("functional all_to_all", back, gathered.view(world_size, -1)[rank].repeat(world_size))
    same(
        "functional broadcast",
        functional.broadcast(mine, 0, ours).wait(),
        value(torch.float32, 1001, 0),
    )

    for size in (4, 300_007, 1_200_001):  # results that were not waited for go into plain calls
        ones = torch.ones(size)
        out = torch.zeros(world_size * size)
        all_gather_single(out, functional.all_reduce(ones, "sum", ours), group=ours)
        assert out.unique().tolist() == [world_size]
        result = functional.all_reduce(ones, "sum", ours)
        dist.broadcast(result, 1, group=ours)
        dist.all_reduce(result, group=ours)
        assert result.unique().tolist() == [world_size**2]

    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank}, group=ours)
    assert objects == [{"rank": r} for r in range(world_size)]
    named = [("from", rank)]
    dist.broadcast_object_list(named, 1, group=ours)
    assert named == [("from", 1)]
    collected = [None] * world_size if rank == 0 else None
    dist.gather_object(rank, collected, 0, group=ours)
    assert collected is None or collected == list(range(world_size))
    got = [None]
    dist.scatter_object_list(got, list("abc"[:world_size]) if rank == 0 else None, 0, group=ours)
    assert got == ["abc"[rank]]
    work = dist.barrier(group=ours, async_op=True)
    work.wait()


def messages():
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for size in (0, 5, 2_500_001):
        output = torch.empty(size)
        sending = dist.isend(value(torch.float32, size, rank), right, group=ours, tag=3)
        dist.send(value(torch.float32, size, rank, 1), right, group=ours, tag=4)
        other = torch.empty(size)
        dist.recv(other, left, group=ours, tag=4)
        dist.recv(output, left, group=ours, tag=3)
        sending.wait()
        same(f"tags {size}", [output, other], [value(torch.float32, size, left, s) for s in (0, 1)])
    numbers = [torch.full((2, 3), -1.0).t() for _ in range(200)]
    receives = [dist.irecv(number, left, group=ours) for number in numbers]
    for count in range(200):
        dist.send(torch.full((3, 2), float(count)), right, group=ours)
    for work in reversed(receives):
        work.wait()
    assert [int(number[0, 0]) for number in numbers] == list(range(200))
    output = torch.empty(9)
    operations = [
        dist.P2POp(dist.isend, value(torch.float32, 9, rank), right, group=ours),
        dist.P2POp(dist.irecv, output, left, group=ours),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    same("batch", output, value(torch.float32, 9, left))
    if rank:
        dist.send(torch.tensor([rank]), 0, group=ours)
    else:
        seen = set()
        for _ in range(world_size - 1):
            output = torch.empty(1, dtype=torch.int64)
            source = dist.recv(output, group=ours)
            assert source == output.item()
            seen.add(source)
        assert seen == set(range(1, world_size))


def subgroups():
    for members in ([0], [1, 0], [0, world_size - 1]):
        group = dist.new_group(members, backend="unisono")
        if rank in members:
            order = sorted(members)
            tensor = value(torch.float32, 1001, rank)
            dist.all_reduce(tensor, group=group)
            everybody = [value(torch.float32, 1001, owner) for owner in order]
            same(f"subgroup {members}", tensor, tree_sum(everybody, torch.add))
            dist.broadcast(tensor, order[-1], group=group)
            dist.destroy_process_group(group)


warnings.simplefilter("error")
torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    init_method=f"file://{path}",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(seconds=60),
)
gloo = dist.group.WORLD
ours = dist.new_group(backend="unisono")
for check in (
    reductions,
    averages_of_integers,
    moves,
    uneven,
    layouts,
    whatever_the_cut,
    forms,
    messages,
    subgroups,
):
    check()
dist.destroy_process_group()
print(f"{checks} checks")
