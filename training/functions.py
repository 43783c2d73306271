"""Functions of a person, which options name as MODULE:FUNCTION."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError


def find(name: str, option: str, example: str) -> Callable[..., Any]:
    """Return the function that an option names as MODULE:FUNCTION. The module may be a
    file in the working directory.

    Args:
        example: A value of the option, for the error.

    Raises:
        UserError: if there is no such function.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        attribute = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(
            f"--{option} must be MODULE:FUNCTION, such as {example} for a function in "
            f"{example.partition(':')[0]}.py. Received: {name!r} ({error})"
        ) from error
    if not callable(attribute):
        raise UserError(
            f"--{option} must name a function. Received: {name!r}, which is {attribute!r}"
        )
    return attribute


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Keep the errors of a person's own function from being taken for mistakes in the
    options: `checking` does not hide their traceback.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise RuntimeError(f"{name} raised {type(error).__name__}: {error}") from error


def trust(functions: Sequence[str], file: Path, command: str, is_trusted: bool) -> None:
    """Check that code may run that a file names, since the file may come from somebody else.

    Args:
        functions: Functions that the file names, each as MODULE:FUNCTION.
        file: The file, for the error.
        command: Command with `--trust`, for the error.
        is_trusted: Whether a person trusts the file.

    Raises:
        UserError: if a person has to decide.
    """
    if functions and not is_trusted:
        names = ", ".join(functions)
        modules = ", ".join(dict.fromkeys(name.partition(":")[0] for name in functions))
        raise UserError(
            f"{file} names the function{'s' * (len(functions) > 1)} {names}, and this command "
            f"would run the code of {modules}. If the file is yours, or you trust whoever wrote "
            f"it: {command}"
        )
