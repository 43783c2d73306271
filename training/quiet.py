"""Imports of TensorFlow without the notes that it writes at every log level."""

import contextlib
import importlib.machinery
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

#: TensorFlow writes these before it reads TF_CPP_MIN_LOG_LEVEL. Error 303 of cuInit: no driver.
NOTES = re.compile(
    r"^(?:WARNING: All log messages before absl.*|I\d{4} .*\.cc:\d+\] .*|To enable .*"
    r"|E\d{4} .*failed call to cuInit.*\(303\))\n",
    re.MULTILINE,
)


class QuietTensorFlow(importlib.machinery.PathFinder):
    """Finder for `sys.meta_path` that imports TensorFlow, and lists the GPUs, without notes."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname != "tensorflow":
            return None
        spec: Any = super().find_spec(fullname, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module):
                with without_notes():
                    execute(module)
                    module.config.list_physical_devices("GPU")

            spec.loader.exec_module = execute_quietly
        return spec


def install() -> None:
    """Import TensorFlow without its notes from now on, in this process."""
    if QuietTensorFlow not in sys.meta_path:
        sys.meta_path.insert(0, QuietTensorFlow)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Hold back what this process writes to stderr, and write it at the end without
    `NOTES`. A process may have no stderr.
    """
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            sys.stderr.write(NOTES.sub("", held.read()))
