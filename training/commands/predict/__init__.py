"""Classify image files with an exported model."""
