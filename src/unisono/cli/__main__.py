"""``python -m unisono.cli``."""

from unisono.cli import main

main()
