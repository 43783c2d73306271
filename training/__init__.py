"""Scripts that train, evaluate and export the networks of keras_preact: `python -m training.train digits`.

An installed package has them as keras_preact_training, and a command for them: `keras-preact train digits`.
"""

from . import _tensorflow

_tensorflow.leave_notes_out()
