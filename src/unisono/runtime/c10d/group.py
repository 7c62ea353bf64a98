"""torch's ProcessGroup over shared memory: translates torch's calls, one method each."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast, final

import torch
from torch.autograd.profiler import record_function
from torch.distributed import BarrierOptions, ProcessGroup

import unisono.runtime.c10d.collectives as collectives
from unisono.runtime.c10d.calls import (
    Vectors,
    all_to_all_call,
    as_vector,
    call_of_each,
    check_movable,
    check_rank,
    encode,
    kind_of,
    listed,
    nested,
    parts,
    rooted_call,
    rows,
)
from unisono.runtime.c10d.collectives import all_reduce, reduction_of
from unisono.runtime.c10d.execution import GroupWork, ReceiveWork, never_compiled
from unisono.runtime.c10d.group_member import GroupMember
from unisono.runtime.c10d.meeting import Meetings
from unisono.runtime.forbidden import check_allowed
from unisono.runtime.workers.memory import keep_freed_memory

Tensor = torch.Tensor
Tensors = list[torch.Tensor]
_NO_TIME = timedelta(0)
_Method = TypeVar("_Method", bound=Callable[..., Any])
_ProcessGroup: Any = ProcessGroup  # torch declares overloads that no caller uses
_KEPT_AT_MOST = 1024
_KEPT_BYTES_AT_MOST = 64


def create(options: Any, backend_options: object) -> Group:
    """Create a group for torch. Collective: every rank of the group calls it."""
    if backend_options is not None:
        raise ValueError("`pg_options` must be None for the backend `unisono`: it has no options.")
    keep_freed_memory()
    names = options.global_ranks_in_group or range(options.group_size)
    return Group(options.store, options.group_rank, list(names), options.timeout.total_seconds())


def _refusals_are_told(method: _Method) -> _Method:
    """Report rejected arguments of this rank to the other ranks, which are about to wait for it."""

    @functools.wraps(method)
    def call(self: Group, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError):
            self.member.refuse()
            raise

    return cast(_Method, call)


@final
@never_compiled
class Group(_ProcessGroup):  # type: ignore[misc]
    """One rank's view of a group; `backend_name` is the name that the program requested."""

    backend_name = "unisono"
    _device_types = (torch.device("cpu"),)  # read by torch's Python code

    def __init__(self, store: Any, rank: int, names: Sequence[int], timeout_s: float) -> None:
        super().__init__(rank, len(names))
        self._rank, self._num_ranks, self._names = rank, len(names), names
        self._name = self._description = ""
        self._kept: deque[GroupWork] = deque(maxlen=_KEPT_AT_MOST)
        self.member = GroupMember(store, rank, names, timeout_s)
        self._board = self.member.board

    @_refusals_are_told
    def allreduce(self, tensors: Tensors | Tensor, opts: Any = None, op: Any = None) -> GroupWork:
        """Reduce one tensor, with the result on every rank."""
        opts = op if opts is None else opts
        (tensor,) = tensors = listed(tensors)
        vectors = Vectors(tensors)
        vector = vectors.filled(tensor)
        dtype, numel = vector.dtype, vector.numel()
        reduction = reduction_of(opts, dtype)
        call = encode("all_reduce", dtype, numel, reduction, shape=tensor.shape)
        steps = all_reduce(self._board, vector, reduction)
        work = self._run(call, opts, steps, vectors)
        if numel == 1 and vector.untyped_storage().nbytes() <= _KEPT_BYTES_AT_MOST:
            # Inside of `join`, DDP passes such a Work to C++ and drops its Python half. Without
            # that half, waiting for the Work would never return.
            self._kept.append(work)
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Reduce several tensors."""
        return self._together(tensors, [self.allreduce(tensor, opts) for tensor in tensors])

    @_refusals_are_told
    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        """Reduce one tensor to the root; the other ranks' tensors are unchanged."""
        (tensor,) = tensors
        vectors, root = Vectors(tensors), opts.rootRank
        check_rank("root", root, self._num_ranks)
        vector = vectors.filled(tensor) if root == self._rank else vectors.given(tensor)
        reduction = reduction_of(opts, vector.dtype)
        call = encode(
            "reduce", vector.dtype, vector.numel(), reduction, self._names[root], shape=tensor.shape
        )
        steps = collectives.reduce(self._board, vector, reduction, root)
        return self._run(call, opts, steps, vectors)

    @_refusals_are_told
    def broadcast(self, tensors: Tensors | Tensor, opts: Any = 0) -> GroupWork:
        """Broadcast the root's tensor to every rank."""
        (tensor,) = tensors = listed(tensors)
        root = opts if isinstance(opts, int) else opts.rootRank
        check_rank("root", root, self._num_ranks)
        vectors = Vectors(tensors)
        vector = vectors.given(tensor) if root == self._rank else vectors.filled(tensor)
        call = encode(
            "broadcast", vector.dtype, vector.numel(), root=self._names[root], shape=tensor.shape
        )
        return self._run(call, opts, collectives.broadcast(self._board, vector, root), vectors)

    @_refusals_are_told
    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> GroupWork:
        """Gather all ranks' tensors on every rank; lengths may differ if all ranks know them."""
        (outputs,), (tensor,) = nested(output_lists), listed(inputs)
        vectors = Vectors(outputs)
        taken = [vectors.filled(output) for output in outputs]
        return self._all_gather(taken, vectors.given(tensor), opts, vectors)

    @_refusals_are_told
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Gather all ranks' tensors on every rank, concatenated in one tensor."""
        vectors = Vectors([output])
        taken = rows(vectors.filled(output), self._num_ranks)
        return self._all_gather(taken, vectors.given(tensor), opts, vectors)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        """Call :meth:`all_gather_single` for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._together(outputs, [self.all_gather_single(*pair, opts) for pair in pairs])

    def allgather_coalesced(
        self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        """Gather several tensors into ``output_lists[rank][position]``."""
        works = [
            self.allgather([[outputs[position] for outputs in output_lists]], [tensor], opts)
            for position, tensor in enumerate(inputs)
        ]
        return self._together(output_lists, works)

    @_refusals_are_told
    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        """Gather all ranks' tensors on the root."""
        (tensor,), outputs = inputs, output_lists[0] if output_lists else []
        vectors, root = Vectors(outputs), opts.rootRank
        vector, taken = vectors.given(tensor), [vectors.filled(output) for output in outputs]
        call = rooted_call("gather", vector, taken, root, self._rank, self._names)
        return self._run(call, opts, collectives.gather(self._board, taken, vector, root), vectors)

    @_refusals_are_told
    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> GroupWork:
        """Scatter the root's tensors, one to each rank."""
        (output,), inputs = outputs, input_lists[0] if input_lists else []
        vectors, root = Vectors(outputs), opts.rootRank
        vector, given = vectors.filled(output), [vectors.given(tensor) for tensor in inputs]
        call = rooted_call("scatter", vector, given, root, self._rank, self._names)
        return self._run(call, opts, collectives.scatter(self._board, vector, given, root), vectors)

    @_refusals_are_told
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> GroupWork:
        """Reduce a list of tensors, one for each rank; lengths may differ within the list."""
        (output,), (inputs,) = listed(outputs), nested(input_lists)
        vectors = Vectors([output])
        given = [vectors.given(tensor) for tensor in inputs]
        return self._reduce_scatter(output, given, opts, vectors)

    @_refusals_are_told
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> GroupWork:
        """Reduce one tensor; each rank gets an equal part."""
        vectors = Vectors([output])
        given = rows(vectors.given(tensor), self._num_ranks)
        return self._reduce_scatter(output, given, opts, vectors)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> GroupWork:
        """Call :meth:`reduce_scatter_single` for several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._together(outputs, [self.reduce_scatter_single(*pair, opts) for pair in pairs])

    @_refusals_are_told
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        """Send each rank one tensor and receive one from each."""
        vectors = Vectors(outputs)
        given = [vectors.given(tensor) for tensor in inputs]
        taken = [vectors.filled(output) for output in outputs]
        return self._all_to_all(taken, given, opts, vectors)

    @_refusals_are_told
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        opts: Any = None,
    ) -> GroupWork:
        """Send each rank a part of one tensor and receive a part of one from each rank."""
        vectors = Vectors([output])
        whole = vectors.filled(output).view(output.shape)
        taken = parts(whole, output_split_sizes, self._num_ranks)
        given = parts(vectors.given(tensor).view(tensor.shape), input_split_sizes, self._num_ranks)
        return self._all_to_all(taken, given, opts, vectors)

    def barrier(self, opts: Any = None) -> GroupWork:
        """Wait until every rank has arrived."""
        return self._run(encode("barrier"), opts, collectives.barrier(), Vectors([]))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until every rank has arrived; the error names late ranks."""
        opts = BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    def send(self, tensors: Tensors, destination: int, tag: int) -> GroupWork:
        """Send a tensor; the send is complete when this returns."""
        check_allowed("send")
        (tensor,) = tensors
        check_rank("destination", destination, self._num_ranks)
        self.member.messages.send(as_vector(tensor), destination, tag)
        return GroupWork(tensors, self.member.execution)

    def recv(self, tensors: Tensors, source: int, tag: int) -> ReceiveWork:
        """Receive a tensor from another rank; :meth:`ReceiveWork.wait` completes the receive."""
        check_rank("source", source, self._num_ranks)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> ReceiveWork:
        """Receive a tensor from any rank."""
        return self._receive(tensors, None, tag)

    # torch's names before 2.11, which its C++ code and older programs still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _get_backend(self, device: torch.device) -> Group:
        """Return the backend of a device: torch queries its capabilities."""
        if device.type != "cpu":
            raise RuntimeError(
                f"the backend `unisono` moves CPU tensors, but was asked for {device}."
            )
        return self

    get_backend = _get_backend  # its name in torch 2.15
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:
        """Return the backend's name. DDP's C++ logger would take "gloo" for torch's class."""
        return "unisono"

    def _get_backend_name(self) -> str:
        """Return the name that the program requested, which torch's Python code compares."""
        return self.backend_name

    name = _get_backend_name

    def getGroupName(self) -> str:
        """Return the name that torch has set for the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description that torch has set for the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description."""
        self._description = description

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long waits may last from now on."""
        self.member.set_timeout(timeout.total_seconds())

    def shutdown(self) -> None:
        """Leave the group."""
        self.member.leave()

    def abort(self) -> None:
        """Leave the group, and report to the others that this rank has failed."""
        self.member.abort()

    def _run(self, call: bytes, opts: Any, steps: Meetings, vectors: Vectors) -> GroupWork:
        """Run a call as torch's `opts` say; for the other arguments see :meth:`GroupMember.run`."""
        check_allowed(kind_of(call))
        timeout = getattr(opts, "timeout", _NO_TIME)  # torch uses a negative timeout for "none"
        timeout_s = timeout.total_seconds() if timeout > _NO_TIME else None
        what = call, steps, vectors, timeout_s, getattr(opts, "asyncOp", False)
        if torch._C._autograd._profiler_enabled():
            with record_function(f"unisono:{kind_of(call)}"):
                calls = self.member.run(*what)
        else:
            calls = self.member.run(*what)
        return GroupWork(vectors.result, self.member.execution, calls)

    def _together(self, tensors: list[Any], works: Sequence[GroupWork]) -> GroupWork:
        """Join the Works of several calls into one whose result is `tensors`."""
        calls = [call for work in works for call in work.calls]
        return GroupWork(tensors, self.member.execution, calls)

    def _all_gather(self, taken: Tensors, given: Tensor, opts: Any, vectors: Vectors) -> GroupWork:
        call = call_of_each("all_gather", given, taken, self._rank, self._num_ranks)
        return self._run(call, opts, collectives.all_gather(self._board, taken, given), vectors)

    def _reduce_scatter(
        self, output: Tensor, given: Tensors, opts: Any, vectors: Vectors
    ) -> GroupWork:
        taken = vectors.filled(output)
        reduction = reduction_of(opts, taken.dtype)
        rank, num_ranks = self._rank, self._num_ranks
        call = call_of_each("reduce_scatter", taken, given, rank, num_ranks, reduction)
        steps = collectives.reduce_scatter(self._board, taken, given, reduction)
        return self._run(call, opts, steps, vectors)

    def _all_to_all(self, taken: Tensors, given: Tensors, opts: Any, vectors: Vectors) -> GroupWork:
        call = all_to_all_call(taken, given, self._num_ranks)
        return self._run(call, opts, collectives.all_to_all(self._board, taken, given), vectors)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> ReceiveWork:
        check_allowed("recv")
        (tensor,) = tensors
        tensor = tensor.detach() if tensor.requires_grad else tensor
        check_movable(tensor)
        messages = self.member.messages
        receive = messages.receive(tensor, source, tag)
        return ReceiveWork(self.member.execution, messages, receive)
