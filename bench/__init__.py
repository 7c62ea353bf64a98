"""Unisono against plain torch and torch's DDP: ratios measured in one sitting."""
