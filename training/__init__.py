"""Scripts that train, evaluate and export the networks of keras_preact: `python -m training.train digits`."""
