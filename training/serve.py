"""Serve exported models over HTTP: `keras-preact serve`."""

import importlib.util
import sys
from collections.abc import Sequence

from . import cli, commands


def main(argv: Sequence[str]) -> None:
    """Start the server; the arguments are those of `keras_preact.serving`."""
    argv, _ = cli.split_verbose(argv)
    _leave_networks_out()
    from keras_preact.serving.__main__ import main as serve

    serve(argv, examples=commands.examples("serve"))


def _leave_networks_out() -> None:
    """Let parts of keras_preact be imported without the package itself, which imports
    Keras: the server needs none of it.
    """
    if "keras_preact" not in sys.modules:
        spec = importlib.util.find_spec("keras_preact")
        if spec is not None:
            sys.modules["keras_preact"] = importlib.util.module_from_spec(spec)
