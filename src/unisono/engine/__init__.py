"""One exact step on any device: state, exchange, step."""
