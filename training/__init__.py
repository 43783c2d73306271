"""The command `keras-preact`, and what it does: train, evaluate, export and study the
networks of keras_preact.

A wheel installs this package as keras_preact_training.
"""

import os

from . import imports

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no notes of TensorFlow, only problems
imports.install()
