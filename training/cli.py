"""What the command lines share: options from type annotations, and errors a person can act on."""

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence

#: For the help texts: an option that every command has, which is none of the function's parameters.
VERBOSE = "--verbose, anywhere on the command line, shows where an error comes from."


class UserError(ValueError):
    """A mistake in what the user gave; the message says what was received and what would work."""


def main(function: Callable, argv: Sequence[str] | None = None) -> None:
    """Call `function` with its parameters taken from the command line.

    A ValueError or an OSError ends the program with one line on stderr and status 2, below its trace with --verbose; an
    interruption ends it with status 130.
    """
    import tyro

    argv, verbose = split_verbose(argv)
    guard(lambda: tyro.cli(function, args=argv, description=described(inspect.getdoc(function))), verbose)


def split_verbose(argv: Sequence[str] | None = None) -> tuple[list[str], bool]:
    """Return the command line, that of this process by default, without --verbose, and whether it was there."""
    argv = sys.argv[1:] if argv is None else argv
    return [argument for argument in argv if argument != "--verbose"], "--verbose" in argv


def described(docstring: str | None) -> str:
    """Return what a help text says of a command: its docstring up to the sections, and --verbose."""
    text, _, _ = (docstring or "").partition("\n\nArgs:")
    return f"{text}\n{VERBOSE}".strip()


def guard(action: Callable[[], object], verbose: bool = False) -> None:
    """Call `action`, and turn its errors into a message and an exit status as `main` describes."""
    if verbose:
        import keras

        keras.config.disable_traceback_filtering()  # which leaves out Keras' own part of a trace
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        if verbose:
            traceback.print_exc()
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
