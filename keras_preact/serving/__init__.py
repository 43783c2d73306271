"""An HTTP server over exported models: `python -m keras_preact.serving saved_models`."""
