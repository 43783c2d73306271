"""A run: its parts, and its training."""
