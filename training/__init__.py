"""Scripts that train, evaluate and export the networks of keras_preact: `python -m training.train digits`."""

import os

# TensorFlow reads the data whatever the backend; its start-up notes would stand in front of every message.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
