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

_LOOK_EVERY_S = 5e-3  # each look takes 50 µs from the passes


class LaneTurn(threading.Thread):
    """Sends buckets as they are ready, and finishes when all sums are here. Final; starts at once.

    Args:
        pipeline: the buckets; this thread's alone until it has ended.
        lane: likewise.
        num_ready: tells how many of the buckets are ready.
        num_buckets: how many there are.

    Attributes:
        error: what nobody has foreseen.
    """

    def __init__(
        self,
        pipeline: BucketPipeline[HostLane],
        lane: HostLane,
        num_ready: Callable[[], int],
        num_buckets: int,
    ) -> None:
        super().__init__(name="unisono-lane")
        self._pipeline, self._lane = pipeline, lane
        self._num_ready, self._num_buckets = num_ready, num_buckets
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See :class:`threading.Thread`."""
        pipeline, lane = self._pipeline, self._lane
        try:
            while (num_ready := self._num_ready()) < self._num_buckets and not pipeline.failure:
                pipeline.send(num_ready, lane)
                lane.progress(_LOOK_EVERY_S)
            pipeline.finish(lane)
        except BrokenError as error:
            pipeline.failure = pipeline.failure or str(error)
        except BaseException as error:
            self.error = error
