"""How the processes of this package import TensorFlow: without the notes that it writes at
every log level, without the accelerator if another backend computes on it, and without
Keras where nothing needs it.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

#: Lines that TensorFlow writes before it reads TF_CPP_MIN_LOG_LEVEL. Error 303: no driver.
NOTES = (
    r"WARNING: All log messages before absl|I\d{4} .*\.cc:\d+\] |To enable "
    r"|E\d{4} .*failed call to cuInit.*\(303\)"
)
#: The program of a process that copies the lines of stdin that are no notes.
_FILTER = """
import re, sys
for line in sys.stdin.buffer:
    if not re.match(sys.argv[1].encode(), line):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
"""


class Finder(importlib.machinery.PathFinder):
    """Finder for `sys.meta_path` of TensorFlow and of Keras."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname not in LOADERS:
            return None
        spec: Any = super().find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = LOADERS[fullname](fullname, spec.origin)
        return spec


class _TensorFlow(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        with without_notes():
            super().exec_module(module)
            module.config.list_physical_devices("GPU")  # it writes notes, too
        keep_accelerator_for_backend()


class _Keras(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        keep_accelerator_for_backend()


#: Loaders by name of the package.
LOADERS: Mapping[str, type[importlib.machinery.SourceFileLoader]] = {
    "tensorflow": _TensorFlow,
    "keras": _Keras,
}


def install() -> None:
    """Use the finder from now on, in this process."""
    if Finder not in sys.meta_path:
        sys.meta_path.insert(0, Finder)


def keep_accelerator_for_backend() -> None:
    """Keep TensorFlow from taking the accelerator's memory if Keras computes with another
    backend. Most commands import TensorFlow on every backend, before Keras or after it: the
    second of the two imports calls this in time. The server imports no Keras.
    """
    tensorflow: Any = sys.modules.get("tensorflow")
    keras: Any = sys.modules.get("keras")
    # a module whose import has not ended, or that `networks_left_out` replaced, lacks these
    if not hasattr(tensorflow, "config") or not hasattr(keras, "backend"):
        return
    if keras.backend.backend() != "tensorflow":
        # in use already, as by a server that imports Keras later
        with contextlib.suppress(RuntimeError):
            tensorflow.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Leave out `NOTES` from what this process writes to stderr.

    Another process copies the other lines: it does so to the end if this one crashes. A
    process may have no stderr.
    """
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    command = [sys.executable, "-I", "-S", "-c", _FILTER, NOTES]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=stderr,
        start_new_session=True,  # Ctrl-C ends this process, and then that one has read everything
    ) as copying:
        os.dup2(copying.stdin.fileno(), 2)  # type: ignore[union-attr]
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


@contextlib.contextmanager
def networks_left_out() -> Iterator[None]:
    """Import modules of keras_preact without the package itself, which imports Keras, and
    TensorFlow without Keras and JAX. The server and `predict` need none of them.

    TensorFlow imports both if it can, to register their optimisers and to convert
    functions. Without them it takes 1.9 s of CPU time instead of 4.1, and 530 MB
    instead of 810. After this block they can be imported again.
    """
    hidden = []
    for name in ("keras_preact", "keras"):
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            hidden.append(name)
    for name in {"keras.src", "jax"} - sys.modules.keys():
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError
        hidden.append(name)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
