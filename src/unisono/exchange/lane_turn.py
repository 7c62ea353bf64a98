"""One exchange of a lane's buckets, in a thread beside the backward pass.

The thread lives no longer than the exchange. It takes over this worker's rounding mode as threads
do, so its additions give the bits that the worker's own would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from unisono.exchange.bucket_pipeline import BucketPipeline
from unisono.exchange.communicator import BrokenError
from unisono.exchange.host_lane import HostLane
from unisono.exchange.ready_buckets import ReadyBuckets

# What other workers of the host have come to has to be looked at; each look takes 50 µs.
_LOOK_EVERY_S, _LOOK_EVERY_WHILE_IDLE_S = 5e-3, 5e-4


class LaneTurn(threading.Thread):
    """Sends buckets as they are ready, and finishes when all sums are here. Final; starts at once.

    Args:
        pipeline: the buckets; this thread's alone until it has ended.
        lane: likewise.
        ready: the buckets of all lanes.
        num_ready: tells how many of this lane's are ready.

    Attributes:
        error: what nobody has foreseen.
    """

    def __init__(
        self,
        pipeline: BucketPipeline[HostLane],
        lane: HostLane,
        ready: ReadyBuckets,
        num_ready: Callable[[], int],
        num_buckets: int,
    ) -> None:
        super().__init__(name="unisono-lane")
        self._pipeline, self._lane, self._ready = pipeline, lane, ready
        self._num_ready, self._num_buckets = num_ready, num_buckets
        self.error: BaseException | None = None
        ready.tell = lane.wake
        self.start()

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        pipeline, lane = self._pipeline, self._lane
        try:
            while (num_ready := self._num_ready()) < self._num_buckets and not pipeline.failure:
                pipeline.send(num_ready, lane)
                # Beside own passes a look costs; afterwards nobody else needs this core.
                is_idle = self._ready.has_all
                lane.progress(_LOOK_EVERY_WHILE_IDLE_S if is_idle else _LOOK_EVERY_S)
            pipeline.finish(lane)
        except BrokenError as error:
            pipeline.failure = pipeline.failure or str(error)
        except BaseException as error:
            self.error = error
