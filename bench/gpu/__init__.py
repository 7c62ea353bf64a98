"""Unisono on one GPU beside a bare loop and its peers: ``make bench-gpu``."""
