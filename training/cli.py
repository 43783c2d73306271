"""What the command lines share: options from type annotations, and errors a person can act on."""

import os
import sys
from collections.abc import Callable, Sequence


class UserError(ValueError):
    """A mistake in what the user gave; the message says what was received and what would work."""


def main(function: Callable, argv: Sequence[str] | None = None) -> None:
    """Call `function` with its parameters taken from the command line.

    A ValueError or an OSError ends the program with one line on stderr and status 2, an interruption with status 130. Set
    TRACEBACK=1 in the environment to see where an error comes from.
    """
    import tyro

    guard(lambda: tyro.cli(function, args=argv))


def guard(action: Callable[[], object]) -> None:
    """Call `action`, and turn its errors into a message and an exit status as `main` describes."""
    try:
        action()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("TRACEBACK"):
            raise
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
