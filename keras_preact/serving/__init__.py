"""Serves exported models over HTTP: `python -m keras_preact.serving saved_models`."""
