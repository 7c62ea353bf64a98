"""Starts, watches and ends the workers of one host."""
