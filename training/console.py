"""The console script: `keras-preact COMMAND ...`, which in a checkout is `python -m training COMMAND ...`."""

import dataclasses
import difflib
import functools
import importlib.metadata
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from . import cli


@dataclasses.dataclass(frozen=True)
class Command:
    """A row of the table.

    Args:
        about: What it does, in a line.
        start: Takes the arguments behind the command's name.
    """

    about: str
    start: Callable[[Sequence[str]], object]


def _script(name: str, about: str) -> Command:
    """Return the command for a script of this package, which runs as `python -m` runs it."""
    return Command(about, functools.partial(_run, name))


def _run(name: str, arguments: Sequence[str]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(f"{__package__}.{name}", run_name="__main__", alter_sys=True)


def _serve(arguments: Sequence[str]) -> None:
    from keras_preact.serving.__main__ import main

    main(arguments, program=f"{cli.PROGRAM} serve")


#: Name to command, in the order in which a person meets them.
COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "train": _script("train", "Train a network by a recipe, such as digits, or go on with a run."),
        "evaluate": _script("evaluate", "Measure a run or a model on the test images: accuracy, confusion matrix."),
        "export": _script("export", "Write a run's network for serving: a SavedModel, ONNX or LiteRT."),
        "predict": _script("predict", "Classify image files with an exported model."),
        "serve": Command("Serve exported models over HTTP.", _serve),
        "convert": _script("convert", "Convert weights from and to the formats of other libraries."),
        "analyze": _script("analyze", "Write a page of pictures of how signals travel through a network."),
        "compare": _script("compare", "Compare runs: options, curves and accuracy side by side."),
        "reproduce": _script("reproduce", "Measure the paper's tables, each published number beside ours."),
        "benchmark": _script("benchmark", "Measure time and memory of networks side by side."),
        "very-deep": _script("very_deep", "Train a network of ten thousand layers for some steps."),
    }
)


def main(argv: Sequence[str] | None = None) -> None:
    """Start the command that is named first; its arguments are its own.

    An unknown command, or the want of a package that the command needs, ends with one line on stderr and status 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    rest, verbose = cli.split_verbose(argv)
    if not rest or rest[0] in ("-h", "--help"):
        print(described())
        return
    if rest[0] == "--version":
        print(f"keras-preact {importlib.metadata.version('keras-preact')}")
        return
    argv.remove(rest[0])
    try:
        with cli.missing_packages():
            _lookup(rest[0]).start(argv)
    except cli.UserError as error:
        cli.fail(error, verbose)


def _lookup(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    near = difflib.get_close_matches(name, COMMANDS)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise cli.UserError(f"Unknown command. {meant}There is: {', '.join(COMMANDS)}. Received: {name!r}")


def described() -> str:
    """Return what `--help` prints."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: {cli.PROGRAM} COMMAND [ARGUMENT ...]",
            "",
            "Pre-activation residual networks on Keras 3, from training to serving.",
            "",
            *rows,
            "",
            f"{cli.PROGRAM} COMMAND --help tells the options of a command.",
            f"{cli.PROGRAM} --version tells the version.",
            "The environment's KERAS_BACKEND chooses tensorflow (default), jax or torch.",
            cli.VERBOSE,
        ]
    )
