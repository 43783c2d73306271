"""Serve exported models over HTTP: `keras-preact serve`."""

from collections.abc import Sequence

from .. import cli
from ..cli import table as commands
from ..imports import networks_left_out


def main(argv: Sequence[str]) -> None:
    """Start the server, with the arguments of `keras_preact.serving`."""
    argv, _ = cli.split_verbose(argv)
    with networks_left_out():
        from keras_preact.serving.__main__ import main as serve

        serve(argv, examples=commands.examples("serve"))
