"""Callbacks: progress, files, averages, decisions. Their public names: ``unisono.callbacks``."""
