"""Each worker says what it sees of GPUs, on one line."""

import json
import os

NAMES = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "UNISONO_WORKERS_PER_GPU",
    "CUBLAS_WORKSPACE_CONFIG",
)

print(json.dumps([os.environ.get(name) for name in NAMES]), flush=True)
