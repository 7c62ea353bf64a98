"""FSDP2: a model of which each rank holds a part, checked against the whole one.

    unisono run -n 2 examples/ddp/fsdp.py

``fully_shard`` cuts every parameter among the ranks, gathers a layer's just before it is used, and
scatters its gradients just after; the optimizer then updates only this rank's part.

The classic mistakes that it avoids:

* *The optimizer built too early*: ``fully_shard`` puts other parameters into the model, so it comes
  first. (What ``.to(device)`` is to DDP.)
* *Every rank writing the file, or its own part only*: the whole state is gathered on the CPU of
  rank 0, under the model's own names, and that rank writes it.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unisono


def build(width, num_layers):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def shard(model, mesh):
    """Cut each layer by itself, so that only one of them is whole at a time; then the rest."""
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, optimizer, inputs, targets):
    loss = F.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole_weights(model):
    """Gather all parameters on rank 0's CPU. Collective: every rank calls it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def train(device, args):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = build(args.width, args.layers).to(device)
    model = build(args.width, args.layers).to(device)
    model = shard(model, init_device_mesh(device.type, (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # after the sharding
    whole_optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)

    generator = torch.Generator().manual_seed(1)
    for number in range(args.steps):
        # Everybody draws the whole batch and takes a part of it; the other model takes all.
        inputs = torch.randn(args.batch_size, args.width, generator=generator).to(device)
        targets = inputs.mean(1, keepdim=True)
        loss = step(model, optimizer, inputs[rank::world_size], targets[rank::world_size])
        whole_loss = step(whole, whole_optimizer, inputs, targets)
        dist.all_reduce(loss)  # parts of the batch are equally large, or we would need counts
        if rank == 0:
            print(f"step {number}  loss {loss / world_size:.6f}  unsharded {whole_loss:.6f}")

    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    print(f"rank {rank} holds {own:,} of {sum(p.numel() for p in whole.parameters()):,} parameters")
    weights = whole_weights(model)
    if rank == 0:
        expected = whole.state_dict()
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name].cpu())
        print("sharded and unsharded agree:", *weights)
        if args.out:
            torch.save(weights, args.out)


def main():
    parser = argparse.ArgumentParser(description="FSDP2, checked against an unsharded model.")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of all workers together")
    parser.add_argument("--out", help="where the whole weights are written")
    args = parser.parse_args()

    is_gpu, here = torch.cuda.is_available(), unisono.world()
    if args.batch_size % here.world_size:
        parser.error(f"--batch-size {args.batch_size} must divide among {here.world_size} workers")
    device = torch.device("cuda", here.local_rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "unisono")
    try:
        train(device, args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
