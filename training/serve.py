"""Serve exported models over HTTP: `keras-preact serve`."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence

from . import cli, commands


def main(argv: Sequence[str]) -> None:
    """Start the server; the arguments are those of `keras_preact.serving`."""
    argv, _ = cli.split_verbose(argv)
    with _networks_left_out():
        from keras_preact.serving.__main__ import main as serve

        serve(argv, examples=commands.examples("serve"))


@contextlib.contextmanager
def _networks_left_out() -> Iterator[None]:
    """Let parts of keras_preact be imported without the package itself, which imports
    Keras, and TensorFlow without Keras and JAX: the server needs none of them.

    TensorFlow imports both if it can, to register their optimisers and to convert
    functions. Without them it takes 1.9 s of CPU time instead of 4.1, and 530 MB
    instead of 810. What is imported afterwards finds them again.
    """
    absent = []
    for name in ("keras_preact", "keras"):
        spec = None if name in sys.modules else importlib.util.find_spec(name)
        if spec is not None:
            sys.modules[name] = importlib.util.module_from_spec(spec)
            absent.append(name)
    for name in {"keras.src", "jax"} - sys.modules.keys():
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError
        absent.append(name)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
