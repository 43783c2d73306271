"""Command lines that pages show: found in the text, and parsed by the command itself
without running it.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest

from training import console, train

#: Programs of other projects that the pages call as modules.
OTHERS = ("pip", "http", "tensorflow_datasets")


def code(text: str) -> list[str]:
    """Return what a page shows as code: lines of indented blocks, of fenced `sh`
    blocks, and spans in single backticks.
    """
    fenced = "\n".join(re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.S))
    rest = re.sub(r"```.*?```", "", text, flags=re.S)
    return [
        *re.findall(r"^    +(\S.*)$", rest, re.M),
        *re.findall(r"`([^`\n]+)`", rest),
        *filter(None, fenced.split("\n")),
    ]


def commands(text: str) -> list[str]:
    """Return the lines of `code` that start `keras-preact COMMAND`; placeholders such
    as `keras-preact COMMAND` are none.
    """
    lines = [re.sub(r"\s+#.*", "", line).strip("$ ") for line in code(text)]
    return [line for line in lines if re.match(r"(\w+=\S+ )*keras-preact (?!COMMAND)\S", line)]


def modules(text: str) -> list[str]:
    """Return the lines of `code` that start `python -m MODULE` of this project."""
    return [
        line for line in code(text) if re.match(rf"python -m (?!(?:{'|'.join(OTHERS)})\b)", line)
    ]


class Parsed(BaseException):
    """Every word of the command line was understood."""


def parse(line: str) -> None:
    """Parse `keras-preact COMMAND ...` as the program does; fail if a command or an
    option does not exist.
    """
    words = shlex.split(line.replace("RECIPE", "digits"), comments=True)
    argv = words[words.index("keras-preact") + 1 :]
    if argv[:2] == ["train", "--resume"]:
        assert len(argv) == 3, line
        return
    if len(argv) == 1:  # a command that is named, without its arguments
        assert argv[0] in console.COMMANDS or argv[0].startswith("--"), line
        return
    if argv[0] == "serve":
        from keras_preact.serving.__main__ import parser

        assert not parser().parse_known_args(argv[1:])[1], line
        return
    import tyro

    def typed(kind, *arguments, **options):
        stub = kind if isinstance(kind, type) else functools.wraps(kind)(lambda *_, **__: None)
        original(stub, *arguments, **options)
        raise Parsed

    original = tyro.cli
    said = io.StringIO()
    with (
        mock.patch.object(tyro, "cli", typed),
        mock.patch.object(train, "train", side_effect=AssertionError(line)),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            console.main(argv)
        except Parsed:
            return
        except SystemExit as ended:
            status = ended.code
        else:
            status = None
    assert not status, f"{line}\n{said.getvalue()}"
    assert any(word in ("--help", "--version") for word in argv), f"{line} ran"


@functools.cache
def help_of(module: str) -> str:
    """Return what `python -m MODULE --help` prints."""
    written, argv = io.StringIO(), sys.argv
    script = (
        f"{module}.__main__"
        if importlib.util.find_spec(module).submodule_search_locations
        else module
    )
    imported = (
        {script: sys.modules.pop(script)} if script in sys.modules else {}
    )  # else `run_module` would warn
    sys.argv = [module, "--help"]
    try:
        with contextlib.redirect_stdout(written), pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
        sys.modules.update(imported)
    assert ended.value.code in (0, None)
    return re.sub(r"\x1b\[[\d;]*m", "", written.getvalue())


def check_module(line: str) -> None:
    """Fail if a `python -m MODULE ...` does not exist or has an option that its help
    does not name.
    """
    module, *arguments = shlex.split(line, comments=True)[2:]
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    assert importlib.util.find_spec(module) is not None, line
    options = [argument for argument in arguments if argument.startswith("--")]
    assert all(re.search(rf"{option}(?![\w.-])", help_of(module)) for option in options), line
