"""The files of a checkpoint, made by hand from a model and an optimizer."""

import json

import torch
from safetensors.torch import save

from unisono.engine.exchange.snapshots import strides_of
from unisono.engine.state.contents import named_parameters
from unisono.engine.state.optimizer_state import group_options, take_state
from unisono.engine.state.saved import FORMAT


def files_of_run(model, optimizer, facts, own=None):
    named = named_parameters(model, optimizer)
    tensors = {**named, **dict(model.named_buffers())}
    kept, rest = take_state(optimizer, named)
    kept |= {f"run.state/{key}": tensor for key, tensor in (own or {}).items()}
    more = {
        "format": FORMAT,
        "groups": group_options(optimizer),
        "numbers": rest,
        "strides": strides_of(kept),
    }
    return {
        "model.safetensors": save(_rows(tensors)),
        "optimizer.safetensors": save(_rows(kept)),
        "run.json": json.dumps({**facts, **more}).encode(),
    }


def _rows(tensors):
    layout = torch.contiguous_format
    return {name: t.detach().clone(memory_format=layout) for name, t in tensors.items()}
