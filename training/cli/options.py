"""Shared by all commands: options from type annotations, help texts, and how a command
ends after an error.
"""

import contextlib
import errno
import functools
import inspect
import io
import os
import select
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ..errors import UserError, command, lookup, missing_packages
from .table import examples

#: For the help texts: an option of every command.
VERBOSE = "With --verbose, an error shows where it comes from."

#: Exit status of a run that was stopped by SIGTERM and can be resumed; EX_TEMPFAIL of sysexits.h,
#: "try again later".
PREEMPTED = 75
#: Exit status after stdout was closed, as by `| head`: that of a program that SIGPIPE ended.
PIPED = 141

#: Numbers of errors of a full disk, which do not name a file. It may be that of stdout.
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


def main(name: str, function: Callable, argv: Sequence[str]) -> None:
    """Call `function` with its parameters taken from the arguments of the command
    `name`. A parameter `verbose` of the function is true with --verbose.

    A `UserError`, a file or folder that this user may not use, and a full disk end the
    program with status 2 and one line on stderr; --verbose also prints the traceback. Any
    other error is a fault of the program or of the machine: it shows its traceback and ends
    with status 1, which launchers start again. Ctrl-C ends it with status 130, and a closed
    stdout with status 141.
    """
    words, verbose = split_verbose(argv)
    if verbose and "verbose" in inspect.signature(function).parameters:
        words.append("--verbose")
    guard(lambda: parse(name, function, words), verbose)


def parse(
    name: str,
    kind: Callable[..., T],
    argv: Sequence[str],
    description: str | None = None,
    **options: Any,
) -> T:
    """Return `kind(...)` with its parameters, or its fields, taken from the arguments
    of the command `name`.

    Args:
        name: Command, as the help text shows it.
        kind: Function or dataclass, with types and a docstring that describes each
            option.
        argv: Arguments after the name.
        description: First part of the help text, after the examples. Default: the
            docstring of `kind`.
        options: Further arguments of `tyro.cli`.
    """
    from . import values

    if description is None:
        description = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0]
    width = min(shutil.get_terminal_size().columns, 100)
    # tyro does not wrap these paragraphs, and joins lines that begin with a letter
    wrap = functools.partial(
        textwrap.fill, width=width, subsequent_indent=" ", break_on_hyphens=False
    )
    lines = ["Examples:", *(f"  {line}" for line in examples(name))]
    return values.parse(
        kind,
        prog=command(name),
        args=argv,
        description="\n\n".join(
            ["\n".join(lines), *map(wrap, [*description.split("\n\n"), VERBOSE])]
        ),
        **options,
    )


def _listing(name: str, description: str, rows: Mapping[str, str], word: str) -> str:
    """Return the help text of a command with a name as its first argument: examples, and
    a line for each name.
    """
    width = max(map(len, rows))
    return "\n".join(
        [
            f"usage: {command(name)} {word} [OPTIONS]",
            "",
            "Examples:",
            *(f"  {line}" for line in examples(name)),
            "",
            description,
            "",
            *(f"  {key:<{width}}  {about}" for key, about in rows.items()),
            "",
            f"Options: {command(name)} {word} --help. {VERBOSE}",
        ]
    )


def choose(
    name: str,
    description: str,
    rows: Mapping[str, str],
    start: Callable[[str, Sequence[str]], object],
    argv: Sequence[str] | None,
    word: str = "COMMAND",
) -> None:
    """Run a command with a name as its first argument: call `start` with this name and
    the arguments after it. Without a name, or for --help, print all names.

    Errors end as in `main`.

    Args:
        name: Command, as the help text shows it.
        description: Part of the help text.
        rows: Lines of the help text, by name.
        start: Function that does the work.
        argv: Arguments. None: the arguments of the process.
        word: Word for a name in the help text: COMMAND or RECIPE.
    """
    words, verbose = split_verbose(sys.argv[1:] if argv is None else argv)

    def act() -> None:
        if not words or words[0] in ("-h", "--help"):
            print(_listing(name, description, rows, word))
            return
        if words[0].startswith("-"):
            line = command(name, word, *words)
            raise UserError(
                f"Name a {word.lower()} first: {line}. Choose one of: {', '.join(rows)}."
            )
        lookup(rows, words[0], f"{word.lower()} of {name}")
        start(words[0], words[1:])

    guard(act, verbose)


def split_verbose(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the arguments without --verbose, and whether it was among them."""
    return [argument for argument in argv if argument != "--verbose"], "--verbose" in argv


def guard(action: Callable[[], object], verbose: bool = False) -> None:
    """Call `action`, and turn its errors into a message and an exit status, as described
    in `main`. Stdout shows characters that its encoding lacks as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if verbose:
        import keras

        keras.config.disable_traceback_filtering()  # which hides Keras' own lines of a traceback
    try:
        try:
            with missing_packages():
                action()
        finally:
            print(end="", flush=True)  # not at exit, where a closed pipe shows a message
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        fail(error, verbose)
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        _discard_stdout()
        sys.exit(PIPED)
    except OSError as error:
        if error.errno in _FULL:
            _discard_stdout()
        # looking whether a file exists may be forbidden, too
        elif not isinstance(error, PermissionError) or error.filename is None:
            raise
        fail(error, verbose)


def _discard_stdout() -> None:
    """Keep Python from writing the rest to stdout at exit, which would fail again."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError):  # it is no file, or None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_is_closed() -> bool:
    """Return whether nobody reads what this process writes, as after `| head`."""
    watched = select.poll()
    watched.register(sys.stdout, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def fail(error: Exception, verbose: bool = False) -> NoReturn:
    """Print the error's message in one line on stderr, after its traceback if `verbose`,
    and end the program with status 2.
    """
    if verbose:
        traceback.print_exception(error)
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    sys.exit(2)
