"""Measure accuracy on test images."""
