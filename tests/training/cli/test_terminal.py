"""Text for people."""

import re

import pytest

import keras_preact as kp
from training.cli import terminal
from training.errors import nearest

LONG = """\
Training a-network (9 parameters) on 10 images.
Run directory: /tmp/a-long-name-of-a-folder"""


@pytest.mark.parametrize(
    ("is_terminal", "columns", "shown"),
    [
        (
            True,
            "30",
            "Training a-network (9\n  parameters) on 10 images.\n"
            "Run directory:\n  /tmp/a-long-name-of-a-folder",
        ),
        (True, "80", LONG),
        (False, "30", LONG),
    ],
    ids=["narrow", "wide", "file"],
)
def test_lines_break_between_words(is_terminal, columns, shown, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.between_words(LONG) == shown


@pytest.mark.parametrize(
    ("name", "names", "text"),
    [
        ("digts", ["digits", "cifar10"], "Did you mean 'digits'? Choose one of: digits, cifar10."),
        ("x", ["digits", "cifar10"], "Choose one of: digits, cifar10."),
        ("cifar_resnet20", kp.list_models(), r"Did you mean '\w+'( or '\w+'){0,2}\?"),
        ("x" * 9, kp.list_models(), r"Choose one of: (\w+, ){11}\w+ and \d+ more\."),
    ],
)
def test_an_unknown_name_is_answered_with_few_names(name, names, text):
    found = nearest(name, names)
    assert found == text or re.fullmatch(text, found)
