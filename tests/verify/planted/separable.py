"""Samples whose class follows from their values, but for noise."""

import torch


def separable(num_samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 10, generator=generator)
    noise = torch.randn(num_samples, generator=generator)
    return x, (x[:, :3].sum(1) + 0.3 * noise > 0).long()
