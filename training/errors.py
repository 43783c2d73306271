"""Errors of a person's input and of the machine, as sentences that say what to do."""

import contextlib
import csv
import difflib
import errno
import math
import shlex
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

#: The one name of the command line.
PROGRAM = "keras-preact"
#: An error lists at most so many names.
LISTED = 12


#: Top-level modules that a command may miss, by the extra of keras-preact that installs them.
_MODULES = {
    "training": "PIL importlib_resources matplotlib rich scipy sklearn tensorboard "
    "tensorflow_datasets tyro",
    "hub": "keras_hub",
    "huggingface": "datasets",
    "benchmark": "timm grain",
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


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `Did you mean ...? Choose one of: ...` for an unknown name; only the question
    for one of many.
    """
    from .cli.terminal import some  # this package imports this module

    names = list(names)
    near = [each for each in names if name and name in each][:3]
    near = near or difflib.get_close_matches(name, names, n=3)
    meant = f"Did you mean {' or '.join(map(repr, near))}?" if near else ""
    if near and len(names) > LISTED:
        return meant
    return f"{meant} Choose one of: {some(names, LISTED)}.".lstrip()


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
def writing(path: object, option: str | None = None) -> Iterator[None]:
    """Turn a lasting error of the system into a `UserError`: the error of a full disk does
    not name the file. If an option chooses the place, the `UserError` names it.
    """
    try:
        yield
    except OSError as error:
        if not is_lasting(error):
            raise
        advice = f". Give another {option}." if option else ""
        raise UserError(f"Cannot write {path}: {error}{advice}") from error


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
        if isinstance(error, PermissionError) and error.filename is not None:
            raise UserError(str(error)) from error  # it says nothing about the content
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
