"""Rows of predictions that other hosts have computed: brought to the file of each host.

Each host has a file of its own, in which its workers have put the rows of their shards. One worker
of each host reads them there and sends them to the others, some MiB at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unisono.train.predictions import Rows
from unisono.workers.team import Team

CHUNK_BYTES = 4 << 20


def share_rows(
    rows: Rows,
    team: Team,
    host_of: Mapping[int, int],
    order: torch.Tensor,
    chunk: int = CHUNK_BYTES,
) -> None:
    """Give every host the rows of all others. Collective: every rank calls it.

    Args:
        rows: of this host, whose own are there.
        team: the workers.
        host_of: for each shard, the host whose workers have computed it.
        order: the samples in the order in which shards take them; shape (samples,).
        chunk: how many bytes a host sends at a time.
    """
    if len(team.hosts) == 1:
        return
    indices = [order[:0] for _ in team.hosts]
    for shard, host in sorted(host_of.items()):
        indices[host] = torch.cat([indices[host], order[shard :: len(host_of)]])
    num = max(1, chunk // max(1, rows.row_bytes))
    for start in range(0, max(map(len, indices)), num):
        here = [some[start : start + num] for some in indices]
        while True:
            if team.leads_host:
                team.put_beside(rows.read(here[team.host]))
            all_came = team.meet("rows of predict")
            for rank, data in team.beside().items():
                host = next(at for at, ranks in enumerate(team.hosts) if rank in ranks)
                if team.leads_host:
                    rows.take(here[host], data)
            if all_came:
                break
    team.meet("rows of predict")  # before a neighbour reads what was written last
