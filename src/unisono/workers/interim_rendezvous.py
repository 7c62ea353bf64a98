from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

from unisono.workers.rendezvous import Places
from unisono.world import World


class InterimRendezvous:
    def __init__(self, here: World) -> None:
        import torch
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://", rank=here.rank, world_size=here.world_size))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store: Any = torch._C._distributed_c10d.PrefixStore(f"unisono/{attempt}/{os.environ['MASTER_PORT']}", store)
        self.store.set_timeout(timedelta(seconds=60))
        self._world_size, self._rank = here.world_size, here.rank
        firsts = self.gather("places", here.rank - here.local_rank)
        hosts = tuple(
            tuple(rank for rank, f in enumerate(firsts) if f == first)
            for first in sorted(set(firsts))
        )
        self.places = Places(here.rank, hosts)
        self.token = self.gather("token", os.urandom(16).hex())[0]

    def gather(self, what: str, mine: object) -> list[Any]:
        self.store.set(f"{what}/{self._rank}", json.dumps(mine))
        return [json.loads(self.store.get(f"{what}/{n}")) for n in range(self._world_size)]
