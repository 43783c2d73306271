"""Resume a run: `keras-preact resume`."""

from collections.abc import Sequence

from .. import cli
from .train import resume


def main(argv: Sequence[str]) -> None:
    cli.main("resume", resume, argv)
