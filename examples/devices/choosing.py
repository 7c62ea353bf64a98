"""Which devices do the examples of this folder compute on? ``--devices``, for all of them.

``cuda:0,cuda:1`` are GPUs. ``cpu,cpu`` is the CPU, taken for two devices: it works everywhere, and
shows everything but speed and memory. ``sim:0,sim:1`` are simulated devices of Unisono's own tests
(``tests/accelerator``): device types of their own, with memory of their own that can be limited.
They are there when the example is run from a checkout of the repository, with a C++ compiler.
"""

import sys
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]


def add_devices(parser, count=2):
    """Add ``--devices`` to the arguments of an example that wants `count` of them."""
    gpus = torch.cuda.device_count()
    usual = [f"cuda:{index}" for index in range(count)] if gpus >= count else ["cpu"] * count
    parser.add_argument(
        "--devices", default=",".join(usual), help="names, with commas (%(default)s)"
    )


def devices_of(args):
    """Give the names of the devices; make simulated ones where they are asked for."""
    names = args.devices.split(",")
    if any(name.startswith("sim") for name in names):
        simulator().install()
    return names


def simulator():
    """Give the module that controls simulated devices, or end with the reason why there is none."""
    if not (REPOSITORY / "tests" / "accelerator").is_dir():
        raise SystemExit(
            "simulated devices must be run from a checkout of Unisono's repository, but there is "
            "no folder tests/accelerator: pass `--devices cpu,cpu`, or names of GPUs."
        )
    sys.path.insert(0, str(REPOSITORY))
    from tests.accelerator import sim

    if reason := sim.why_not():
        raise SystemExit(f"there are no simulated devices: {reason}")
    return sim
