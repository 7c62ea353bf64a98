"""``python -m unisono.doctor.torch_probe``: what torch says of itself, as JSON.

In a process of its own: a torch that is broken may end it, or never come back.
"""

from __future__ import annotations

import json
from typing import Any


def facts_of_torch() -> dict[str, Any]:
    """Load torch, and ask it."""
    import torch as typed

    torch: Any = typed
    facts: dict[str, Any] = {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "openmp": torch.backends.openmp.is_available(),
        "distributed": torch.distributed.is_available(),
    }
    if facts["distributed"]:
        facts["gloo"] = torch.distributed.is_gloo_available()
        facts["nccl"] = torch.distributed.is_nccl_available()
    if facts["cuda"] or facts["hip"]:
        facts.update(_facts_of_gpus(torch))
    return facts


def _facts_of_gpus(torch: Any) -> dict[str, Any]:
    try:
        torch.cuda.init()
    except Exception as error:
        return {"gpu_trouble": str(error).partition("\n")[0], "gpus": []}
    gpus = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    return {
        "arch_list": torch.cuda.get_arch_list(),
        "gpus": [
            {
                "name": gpu.name,
                "memory": gpu.total_memory,
                "capability": [gpu.major, gpu.minor],
                "multiprocessors": gpu.multi_processor_count,
            }
            for gpu in gpus
        ],
    }


if __name__ == "__main__":
    print(json.dumps(facts_of_torch()))
