"""A command that cannot write its results says so in one line, before its work."""

from pathlib import Path

import pytest

from tests.training.calls import error_of, words
from training.cli import console

#: A folder in which nobody can make a file or a folder, not even root.
FOLDER = Path("/proc")

#: What takes long.
WORK = (
    "training.commands.evaluate.__main__._measure",
    "training.commands.analyze.__main__._write",
    "training.reproduce.claims.check.Claim.find",
    "training.reproduce.depth.measured_apart",
    "training.children.statuses",
    "training.benchmark.rounds.run",
    "training.benchmark.turns.measure",
    "training.benchmark.input.make_photographs",
    "training.benchmark.very_deep._build",
)

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="a folder of Linux")


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("evaluate {run} --output {folder}", "--output"),
        ("evaluate {run} --output {folder}/new", "--output"),
        ("analyze {run} --output {folder}/new", "--output"),
        ("export {run} --name new --output {folder}", "--output"),
        ("compare {run} --output {folder}/new", "--output"),
        ("train digits --output {folder}/new", "--output"),
        ("reproduce claims --only gate-10 --output {folder}", "--output"),
        ("reproduce depth --output {folder}", "--output"),
        ("reproduce digits --output {folder}", "--output"),
        ("reproduce digits --output {empty} --work {folder}", "--work"),
        ("reproduce rates --output {folder}", "--output"),
        ("reproduce rates --output {empty} --work {folder}", "--work"),
        ("benchmark step --output {folder}/new.json", "--output"),
        ("benchmark exports dense_resnet6 --output {folder}/new.json", "--output"),
        ("benchmark input --output {folder}/new.json", "--output"),
        ("benchmark very-deep preact --output {folder}/new.json", "--output"),
        # a folder in place of a file
        ("benchmark step --output {folder}", "--output"),
        ("benchmark input --output {folder}", "--output"),
    ],
)
def test_the_folder_and_its_option_are_named(line, option, run, tmp_path, monkeypatch, capsys):
    for work in WORK:
        monkeypatch.setattr(work, None)  # a call would be another error
    arguments = words(line.format(run=run, folder=FOLDER, empty=tmp_path))
    message = error_of(capsys, console.main, arguments)
    assert message.startswith(f"error: Cannot write {FOLDER}")
    assert message.endswith(f"Give another {option}.\n")
