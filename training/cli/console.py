"""The command line: `keras-preact COMMAND ...`."""

import gc
import importlib
import os
import sys
from collections.abc import Sequence

from .. import cli
from ..errors import PROGRAM, lookup
from . import version
from .table import COMMANDS


def main(argv: Sequence[str] | None = None) -> None:
    """Start the command that the first argument names, with the other arguments.

    An unknown command, or a missing package that the command needs, ends with one line
    on stderr and status 2.
    """
    # TensorFlow leaves these kernels out on CPUs without AVX-512. With AVX2 alone, a network for
    # CIFAR trains 1.5 times as fast with them.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    # The import of TensorFlow makes a million objects, and they stay. With Python's threshold of
    # 700, the garbage collector takes a fifth of its time.
    gc.set_threshold(50_000, 20, 100)
    argv = list(sys.argv[1:] if argv is None else argv)
    words, verbose = cli.split_verbose(argv)
    reporting = words[:1] == ["--version"]  # also of a backend that cannot be imported
    cli.guard(lambda: _start(words, argv, verbose), verbose and not reporting)


def _start(words: Sequence[str], argv: list[str], verbose: bool) -> None:
    if words[:1] == ["help"]:
        words = argv = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(described())
        return
    if words[0] == "--version":
        for line in version.lines(verbose):
            print(line, flush=True)
        return
    name = words[0]
    argv.remove(name)
    module = lookup(COMMANDS, name, "command").module or f"commands.{name}"
    importlib.import_module(f"..{module}", __package__).main(argv)


def described() -> str:
    """Return what `--help` prints."""
    width = max(map(len, COMMANDS))
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    lines = [
        f"usage: {PROGRAM} COMMAND [OPTIONS]",
        "",
        "Pre-activation ResNets for Keras 3: train them, study them, serve them.",
    ]
    for group in groups:
        lines += ["", f"{group}:"]
        lines += [
            f"  {name:<{width}}  {command.about}"
            for name, command in COMMANDS.items()
            if command.group == group
        ]
    lines += [
        "",
        f"Options and examples: {PROGRAM} COMMAND --help.",
        f"Versions, for a report of a bug: {PROGRAM} --version --verbose.",
        f"Set KERAS_BACKEND to tensorflow (default), jax or torch. {cli.VERBOSE}",
    ]
    return "\n".join(lines)
