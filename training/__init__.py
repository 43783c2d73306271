"""Scripts that train, evaluate and export the networks of keras_preact: `python -m training.train digits`."""

import contextlib
import importlib
import os
import re
import sys
import tempfile

#: TensorFlow's start-up notes on oneDNN and missing GPUs, which it writes whatever the log level is set to.
_NOTE = re.compile(
    rb"WARNING: All log messages before absl|I\d{4} .*(port|cudart_stub|cpu_feature_guard)\.cc|E\d{4} .*failed call to cuInit"
)


def _import_tensorflow_without_notes() -> None:
    """Import TensorFlow, which reads the data whatever the backend, and keep its notes out of the way of other messages.

    They are written by C++ code to the file descriptor itself. Everything else it writes is passed on.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written, contextlib.suppress(ImportError):
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            tensorflow = importlib.import_module("tensorflow")
            tensorflow.config.list_physical_devices()  # looks for GPUs now, and says that there is none now
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            os.write(2, b"".join(line for line in written if not _NOTE.match(line)))


_import_tensorflow_without_notes()
