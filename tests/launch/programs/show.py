"""Prints what a program can see of how it was started, as one line of JSON."""

import importlib
import json
import os
import random
import sys

# Beside plain Python what torch says is not compared, and to load it takes seconds.
torch = importlib.import_module("torch") if "RANK" in os.environ else None
seen = {
    "argv": sys.argv,
    "file": __file__,
    "name": __name__,
    "is_main": sys.modules["__main__"].__dict__ is globals(),
    "spec": getattr(__spec__, "name", None),
    "path": sys.path,
    "folder": os.getcwd(),
    "rank": os.environ.get("RANK"),
    "size": os.environ.get("WORLD_SIZE"),
    "threads": torch and torch.get_num_threads(),
    "omp": os.environ.get("OMP_NUM_THREADS"),
    "draws": [random.random(), torch and torch.rand(1).item()],
}
print(json.dumps(seen))
