"""What the command lines share: options from type annotations, and errors a person can act on."""

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

#: For the help texts: an option that every command has, which is none of the function's parameters.
VERBOSE = "--verbose, anywhere on the command line, shows where an error comes from."


#: Top-level module that a command may miss to the extra of keras-preact that installs it.
EXTRAS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("PIL", "importlib_resources", "matplotlib", "scipy", "sklearn", "tensorboard"), "training"),
        **dict.fromkeys(("tensorflow_datasets", "tyro"), "training"),
        "keras_hub": "hub",
        "timm": "benchmark",
        "safetensors": "weights",
        **dict.fromkeys(("starlette", "uvicorn", "httptools", "orjson", "prometheus_client"), "serving"),
        **dict.fromkeys(("onnx", "onnxruntime", "tf2onnx"), "onnx"),
        **{name: name for name in ("jax", "openvino", "ray", "torch")},
        "ai_edge_litert": "litert",
    }
)


#: What `python -m` and the console script are called that list the commands.
PROGRAM = "python -m training" if __package__ == "training" else "keras-preact"


class UserError(ValueError):
    """A mistake in what the user gave; the message says what was received and what would work."""


def main(function: Callable, argv: Sequence[str] | None = None) -> None:
    """Call `function` with its parameters taken from the command line.

    A ValueError or an OSError ends the program with one line on stderr and status 2, below its trace with --verbose; an
    interruption ends it with status 130.
    """
    argv, verbose = split_verbose(argv)

    def run() -> None:
        import tyro

        tyro.cli(function, prog=program(), args=argv, description=described(inspect.getdoc(function)))

    guard(run, verbose)


def command(name: str) -> str:
    """Return how a person starts a script of this package: `python -m training.evaluate`, installed `keras-preact evaluate`.

    Args:
        name: Of the module in this package.
    """
    if __package__ == "training":  # in a checkout, which has the scripts under this name
        return f"python -m training.{name}"
    return f"python -m {__package__}.{name}" if "." in name else f"keras-preact {name.replace('_', '-')}"


def program() -> str | None:
    """Return, for the help texts, how the script was started that is running; None for a script of another package."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    package, _, name = module.partition(".")
    return command(name) if package == __package__ and name else None


def split_verbose(argv: Sequence[str] | None = None) -> tuple[list[str], bool]:
    """Return the command line, that of this process by default, without --verbose, and whether it was there."""
    argv = sys.argv[1:] if argv is None else argv
    return [argument for argument in argv if argument != "--verbose"], "--verbose" in argv


def described(docstring: str | None) -> str:
    """Return what a help text says of a command: its docstring up to the sections, and --verbose.

    Commands in it are written as in a checkout, and become those that work here.
    """
    text, _, _ = (docstring or "").partition("\n\nArgs:")
    text = re.sub(r"python -m\s+training\.(\w+)", lambda found: command(found[1]), text)
    return f"{text}\n{VERBOSE}".strip()


def guard(action: Callable[[], object], verbose: bool = False) -> None:
    """Call `action`, and turn its errors into a message and an exit status as `main` describes."""
    if verbose:
        import keras

        keras.config.disable_traceback_filtering()  # which leaves out Keras' own part of a trace
    try:
        with missing_packages():
            action()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        fail(error, verbose)


def fail(error: Exception, verbose: bool = False) -> NoReturn:
    """End the program with the error's message in one line on stderr, below its trace if `verbose`, and status 2."""
    if verbose:
        traceback.print_exception(error)
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def missing_packages() -> Iterator[None]:
    """Turn the want of a package of `EXTRAS` into a `UserError` that names the extra, as keras_preact's own errors do."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            told = f"This needs {package}, which is not installed: pip install 'keras-preact[{EXTRAS[package]}]'"
            raise UserError(told) from error
        if "pip install 'keras-preact[" in str(error):
            raise UserError(str(error)) from error
        raise
