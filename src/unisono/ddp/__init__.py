"""Programs that speak torch.distributed themselves, and what they import from Unisono."""
