"""Finds the command lines in a page, and parses them with the command's own parser
without running them.
"""

import contextlib
import functools
import io
import re
import shlex
from unittest import mock

import tyro

from training.cli import console
from training.commands import train


def code(text: str) -> list[str]:
    """Return what a page shows as code: lines of indented blocks, of fenced `sh`
    blocks, and spans in single backticks. A line that ends in a backslash continues.
    """
    text = re.sub(r" *\\\n +", " ", text)
    fenced = "\n".join(re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.S))
    rest = re.sub(r"```.*?```", "", text, flags=re.S)
    return [
        *re.findall(r"^    +(\S.*)$", rest, re.M),
        *re.findall(r"`([^`\n]+)`", rest),
        *filter(None, fenced.split("\n")),
    ]


def commands(text: str) -> list[str]:
    """Return the lines of `code` that start a command of `keras-preact`. Placeholders such
    as `keras-preact COMMAND` do not count.
    """
    lines = [re.sub(r"\s+#.*", "", line).strip("$ ") for line in code(text)]
    return [line for line in lines if re.match(r"(\w+=\S+ )*keras-preact (?!COMMAND)\S", line)]


class Parsed(BaseException):
    """Raised when every word of the command line was understood."""


def parse(line: str) -> None:
    """Parse `keras-preact COMMAND ...` as the program does; fail if a command or an
    option does not exist.
    """
    words = shlex.split(line.replace("RECIPE", "digits"), comments=True)
    argv = words[words.index("keras-preact") + 1 :]
    if argv[1:2] == ["--config"]:  # the run of a person
        argv = [argv[0], "digits", *(word for word in argv[3:] if word != "--trust")]
    if argv[0] in ("train", "sweep", "reproduce") and ":" in "".join(argv[1:2]):  # MODULE:RECIPE
        argv[1] = "digits"
    if len(argv) == 1:  # a command that is named, without its arguments
        assert argv[0] in console.COMMANDS or argv[0].startswith("--"), line
        return
    if argv[0] == "serve":
        from keras_preact.serving.__main__ import parser

        assert not parser().parse_known_args(argv[1:])[1], line
        return

    def typed(kind, *arguments, cli=tyro.cli, **options):
        stub = kind if isinstance(kind, type) else functools.wraps(kind)(lambda *_, **__: None)
        cli(stub, *arguments, **options)
        raise Parsed

    output = io.StringIO()
    with (
        mock.patch.object(tyro, "cli", typed),
        mock.patch.object(train, "train", side_effect=AssertionError(line)),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        contextlib.suppress(Parsed),
    ):
        status = None
        try:
            console.main(argv)
        except SystemExit as ended:
            status = ended.code
        assert not status, f"{line}\n{output.getvalue()}"
        assert any(word in ("--help", "--version") for word in argv), f"{line} ran"
