"""Values of options, as they are read and shown."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from training import cli


@dataclasses.dataclass(frozen=True)
class Part:
    count: int = 1
    """A count that
    has two lines."""


@dataclasses.dataclass(frozen=True)
class Options:
    part: Part = Part()
    rate: float = 1e-4
    text: str = "a"
    path: Path | None = None
    kind: Literal["wide", "deep"] = "wide"
    own: Literal["batch", "none"] | str | None = None
    heat: Literal["fitted"] | float = 1.0
    pair: tuple[int, float] | None = None
    several: tuple[float, ...] = ()
    switch: bool = True
    maybe: bool | None = None


def read(line: str) -> Options:
    return cli.parse("resume", Options, shlex.split(line))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {}),
        ("--part.count -3", {"part": Part(-3)}),
        ("--rate -1e-3 --text -- --path a", {"rate": -1e-3, "text": "--", "path": Path("a")}),
        ("--kind deep --own none --heat 2", {"kind": "deep", "own": "none", "heat": 2.0}),
        ("--own mine:Part --heat fitted", {"own": "mine:Part", "heat": "fitted"}),
        ("--pair 2 -0.5 --several", {"pair": (2, -0.5)}),
        (
            "--several 1 2.5 --no-switch --maybe",
            {"several": (1, 2.5), "switch": False, "maybe": True},
        ),
        ("--no-maybe", {"maybe": False}),
        # the value of an option that is not given
        ("--own None --pair None --path None", {}),
    ],
)
def test_values(line, expected):
    found = read(line.replace("--text --", "--text=--"))
    assert found == dataclasses.replace(Options(), **expected)
    assert all(type(getattr(found, name)) is type(value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--part.count 1.5", "--part.count: must be a whole number. Received: 1.5"),
        ("--rate fast", "--rate: must be a number. Received: fast"),
        ("--kind wider", "unknown value 'wider'. Did you mean 'wide'? Choose one of: wide, deep."),
        ("--heat hot", "--heat: must be fitted or a number. Received: hot"),
        ("--pair 2", "--pair: must be 2 values. Received: 2"),
        ("--pair 2 x", "--pair: must be a number. Received: x"),
        ("--several 1 x", "--several: must be a number. Received: x"),
        # of variables of the shell that are not set
        ("--path ''", "--path: must not be empty: is a variable not set? Received: ''"),
        ("--text ' '", "--text: must not be empty: is a variable not set? Received: ' '"),
        ("--own ''", "--own: must not be empty"),
        ("--several 1 ''", "--several: must not be empty"),
    ],
)
def test_other_values(line, message, capsys):
    with pytest.raises(SystemExit) as ended:
        read(line)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def help_of(kind, capsys) -> str:
    with pytest.raises(SystemExit):
        cli.parse("resume", kind, ["--help"])
    return " ".join(re.sub("[│╭╮╰╯─]|-{3,}", " ", capsys.readouterr().out).split())


def test_help(capsys):
    text = help_of(Options, capsys).replace(" part options", "")
    assert text.partition("message and exit --")[2].split(" --") == [
        *("rate NUMBER (default: 0.0001)", "text TEXT (default: a)", "path PATH"),
        *("kind {wide,deep} (default: wide)", "own {batch,none,TEXT}"),
        *("heat {fitted,NUMBER} (default: 1)", "pair NUMBER NUMBER", "several [NUMBER ...]"),
        *("switch,", "no-switch (default: on)", "maybe,", "no-maybe"),
        "part.count NUMBER A count that has two lines. (default: 1)",
    ]


def test_help_of_a_function(capsys):
    def measure(
        runs: Annotated[
            tuple[Path, ...],
            tyro.conf.Positional,
            tyro.conf.arg(metavar="RUN ...", help_behavior_hint="(one or more)"),
        ],
        /,
        best: bool = False,
    ) -> tuple:
        """Measure.

        Args:
            runs: Runs that
                are measured.
            best: Measure the best.
        """
        return runs, best

    assert cli.parse("resume", measure, ["a", "b", "--best"]) == ((Path("a"), Path("b")), True)
    text = help_of(measure, capsys)
    assert "RUN ... Runs that are measured. (one or more)" in text
    assert "--best, --no-best Measure the best. (default: off)" in text
