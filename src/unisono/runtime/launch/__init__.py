"""Starting, watching and ending the workers of one host."""
