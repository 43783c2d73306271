"""Serve exported models over HTTP: `keras-preact serve`."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence

from . import cli, commands


def main(argv: Sequence[str]) -> None:
    """Start the server, with the arguments of `keras_preact.serving`."""
    argv, _ = cli.split_verbose(argv)
    with _networks_left_out():
        from keras_preact.serving.__main__ import main as serve

        serve(argv, examples=commands.examples("serve"))


@contextlib.contextmanager
def _networks_left_out() -> Iterator[None]:
    """Import modules of keras_preact without the package itself, which imports Keras, and
    TensorFlow without Keras and JAX. The server needs none of them.

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
