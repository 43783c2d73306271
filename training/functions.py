"""Functions and objects of a person, which options name as MODULE:FUNCTION."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import UserError


def is_own(name: str | None) -> bool:
    """Whether the value of an option is the MODULE:OBJECT of a person."""
    return name is not None and ":" in name


def find_object(name: str, what: str, example: str) -> Any:
    """Return the object MODULE:OBJECT. The module may be a file in the working directory.

    Args:
        what: What names it, for the error.
        example: Another name of this kind, for the error.

    Raises:
        UserError: if there is no such object.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserError(
            f"{what} must be MODULE:NAME, such as {example} for {example.partition(':')[2]} in "
            f"{example.partition(':')[0]}.py. Received: {name!r} ({error})"
        ) from error


def find(name: str, option: str, example: str) -> Callable[..., Any]:
    """Return the function that an option names as MODULE:FUNCTION. The module may be a
    file in the working directory.

    Args:
        example: A value of the option, for the error.

    Raises:
        UserError: if there is no such function.
    """
    attribute = find_object(name, f"--{option}", example)
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
        functions: Functions and objects that the file names, each as MODULE:FUNCTION.
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
            f"{file} names {names}, and this command would run the code of {modules}. If the file "
            f"is yours, or you trust whoever wrote it: {command}"
        )
