"""Unisono against Accelerate, Lightning Fabric and Lightning: ``make bench-peers``."""
