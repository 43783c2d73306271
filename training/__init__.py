"""The command `keras-preact`, and what it does: train, evaluate, export and study the
networks of keras_preact.

A wheel installs this package as keras_preact_training.
"""

from . import _tensorflow

_tensorflow.leave_notes_out()
