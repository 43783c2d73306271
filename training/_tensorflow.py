"""Keeps TensorFlow's start-up notes out of the way of other messages, whoever imports
it.
"""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

#: Notes on oneDNN and missing GPUs, which TensorFlow writes whatever the log level is set to.
_NOTE = re.compile(
    rb"WARNING: All log messages before absl|I\d{4} .*(port|cudart_stub|cpu_feature_guard)\.cc|E\d{4} .*failed call to cuInit"
)


def leave_notes_out() -> None:
    """Have TensorFlow imported without its notes from here on. Everything else that it
    writes is passed on.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds TensorFlow as Python's own finder does, with another way to run it."""

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader.exec_module = functools.partial(_run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _run(execute: Callable[[ModuleType], None], tensorflow: ModuleType) -> None:
    # Its C++ code writes to the file descriptor itself.
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            execute(tensorflow)
            # looks for GPUs now, and says that there is none now
            tensorflow.config.list_physical_devices()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            os.write(2, b"".join(line for line in written if not _NOTE.match(line)))
