"""Shared by all commands: options from type annotations, help texts, and errors that
say what to do.
"""

import contextlib
import csv
import difflib
import errno
import importlib
import inspect
import io
import math
import os
import select
import shlex
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from .commands import examples

#: The one name of the command line.
PROGRAM = "keras-preact"

#: For the help texts: an option of every command.
VERBOSE = "With --verbose, an error shows where it comes from."

#: Top-level modules that a command may miss, by the extra of keras-preact that installs them.
_MODULES = {
    "training": "PIL importlib_resources matplotlib rich scipy sklearn tensorboard "
    "tensorflow_datasets tyro",
    "hub": "keras_hub",
    "huggingface": "datasets",
    "benchmark": "timm",
    "weights": "safetensors",
    "serving": "starlette granian orjson prometheus_client pydantic",
    "onnx": "onnx onnxruntime tf2onnx",
    "litert": "ai_edge_litert",
} | {name: name for name in ("jax", "openvino", "ray", "torch")}

#: Extra that installs a module, by module.
EXTRAS: Mapping[str, str] = {
    module: extra for extra, modules in _MODULES.items() for module in modules.split()
}

#: Errors that are raised for a file with unexpected content.
_UNREADABLE = (
    *(OSError, AttributeError, KeyError, TypeError, ValueError),
    *(csv.Error, zipfile.BadZipFile),
)

#: Numbers of errors of the system that last until a person acts. Others, such as those of a disk
#: in a network, may pass: a launcher tries again.
_LASTING = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.EINVAL, errno.ENAMETOOLONG, errno.ETXTBSY, errno.EBUSY),
)
#: Exit status after stdout was closed, as by `| head`: that of a program that SIGPIPE ended.
PIPED = 141

T = TypeVar("T")


class UserError(ValueError):
    """A mistake in the user's input. The message says what was received and what would
    work.
    """


def command(name: str, *arguments: object) -> str:
    """Return how a person starts a command: `keras-preact evaluate 'my run'`, quoted for a
    shell.
    """
    return shlex.join([PROGRAM, *name.split(), *map(str, arguments)])


def main(name: str, function: Callable, argv: Sequence[str]) -> None:
    """Call `function` with its parameters taken from the arguments of the command
    `name`.

    A `UserError` ends the program with status 2 and one line on stderr; --verbose also
    prints its traceback. Any other error is a fault of the program or of the machine: it
    shows its traceback and ends with status 1, which launchers start again. Ctrl-C ends
    it with status 130, and a closed stdout with status 141.
    """
    argv, verbose = split_verbose(argv)
    guard(lambda: parse(name, function, argv), verbose)


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
    import tyro

    if description is None:
        description = (inspect.getdoc(kind) or "").partition("\n\nArgs:")[0]
    lines = ["Examples:", *(f"  {line}" for line in examples(name))]
    return tyro.cli(
        kind,
        prog=command(name),
        args=argv,
        description="\n\n".join(["\n".join(lines), description, VERBOSE]),
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName),
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
        lookup(rows, words[0], f"{word.lower()} of {name}")
        start(words[0], words[1:])

    guard(act, verbose)


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the row of a table, or raise a UserError that names the nearest one."""
    if name in table:
        return table[name]
    raise UserError(f"Unknown {what}: {name!r}. {nearest(name, table)}")


def check_positive(**options: float | None) -> None:
    """Raise a UserError for an option that is given and not positive."""
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} must be positive. Received: {value}")


def check_utf8(name: object, what: str) -> None:
    """Raise a UserError for a name with bytes that are not UTF-8. Image files may have such
    names, but TensorFlow takes no such folder, and no such class has a place in an export.
    """
    try:
        str(name).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} must be UTF-8: choose another one. Received: {str(name)!r}"
        ) from error


def read_option(text: str) -> tuple[str, Any]:
    """Return name and value of `NAME=VALUE`. The value is a number, a bool, None or the
    text itself.
    """
    name, _, value = text.partition("=")
    if not value:
        raise UserError(f"Options are written NAME=VALUE. Received: {text}")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return name, words[value.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return name, kind(value)
    return name, value


def function_of_user(name: str, option: str, example: str) -> Callable[..., Any]:
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


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `Did you mean ...? Choose one of: ...` for an unknown name."""
    names = list(names)
    near = [each for each in names if name in each][:3]
    near = near or difflib.get_close_matches(name, names, n=3)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"{meant}Choose one of: {', '.join(names)}."


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPED)


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


def is_lasting(error: BaseException) -> bool:
    """Return whether an error stays until a person acts. The errors of the system that may
    pass by themselves are those of a shared disk or a network.
    """
    return not isinstance(error, OSError) or error.errno in (None, *_LASTING)


@contextlib.contextmanager
def checking() -> Iterator[None]:
    """Turn the ValueErrors that the library raises for arguments, and lasting errors of the
    system, into `UserError`s.

    It is for code that gets options of a person, before the work begins. A ValueError of
    the work itself is a fault of the program.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) or not is_lasting(error):
            raise
        raise UserError(str(error)) from error


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Turn a lasting error of the system into a `UserError`: the error of a full disk does
    not name the file.
    """
    try:
        yield
    except OSError as error:
        if not is_lasting(error):
            raise
        raise UserError(f"Cannot write {path}: {error}") from error


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


@contextlib.contextmanager
def reading(message: str) -> Iterator[None]:
    """Turn the errors that a file with unexpected content raises into a `UserError` with
    `message` and the error.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{message}: {error}") from error
    except _UNREADABLE as error:
        if not is_lasting(error):
            raise
        raise UserError(f"{message}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def missing_packages() -> Iterator[None]:
    """Turn the error of a missing package of `EXTRAS` into a `UserError` that names the
    extra.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            raise UserError(
                f"This needs {package}, which is not installed: "
                f"pip install 'keras-preact[{EXTRAS[package]}]'"
            ) from error
        if "pip install 'keras-preact[" in str(error):
            raise UserError(str(error)) from error
        raise
