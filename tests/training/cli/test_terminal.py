"""Text for people."""

import pytest

from training.cli import terminal

LONG = "Training a-network (9 parameters) on 10 images.\nRun directory: /tmp/a-long-name-of-a-folder"


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
