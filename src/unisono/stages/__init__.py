"""A model cut into stages, each computed elsewhere."""
