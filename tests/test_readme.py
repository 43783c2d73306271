"""README tells the truth: its Python runs, its commands parse, its numbers are those of the tables."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

import keras_preact as kp
from training import train
from training.reproduce import results
from training.reproduce.trials import TABLES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_python_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_table_of_arrangements_holds_the_published_numbers():
    published = {(row.row, row.network): row.error for row in kp.published.results(table="2")}
    rows = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|$", README, flags=re.M)
    rows = {name: cells for name, *cells in rows if name in kp.ARRANGEMENTS}
    assert list(rows) == list(kp.ARRANGEMENTS)
    words = {"norm": "BN", "activation": "ReLU"}
    for name, (branch, after, *errors) in rows.items():
        row = kp.ARRANGEMENTS[name]
        order = [*row.first, "W", *row.between, "W", *row.last]
        assert branch.split() == [words.get(part, part) for part in order]
        assert after.split() == [words[part] for part in row.after_addition]
        numbers = [published.get((name, network)) for network in ("ResNet-110", "ResNet-164")]
        assert [error.strip() for error in errors] == ["" if number is None else f"{number:.2f}" for number in numbers]


def test_named_models_exist():
    for name in re.findall(r"`((?:cifar|imagenet|dense|digits)_\w+)`", README):
        assert name in kp.list_models(), name
    assert f"{kp.model_entry('cifar_resnet110_preact').parameters.trainable:,} trainable parameters" in README


@pytest.mark.parametrize("line", re.findall(r"^    (python -m training\.train \w.*)$", README, flags=re.M))
def test_training_commands_parse(line, monkeypatch):
    ran = []
    monkeypatch.setattr(train, "train", lambda config, recipe: ran.append((recipe, config)))
    arguments = shlex.split(line, comments=True)[3:]
    train.main(arguments)
    [(recipe, config)] = ran
    assert recipe == arguments[0]
    if "--model.gate-bias" in arguments:
        assert config.model.gate_bias == -6.0


def test_commands_of_reproduce_exist():
    from training.reproduce.__main__ import COMMANDS

    named = set(re.findall(r"^    python -m training\.reproduce ([\w-]+)", README, flags=re.M))
    assert named
    assert named <= set(COMMANDS)


def test_results_in_small_are_those_of_the_files():
    [paragraph] = re.findall(r"^No row on CIFAR is measured yet.*?\n\n", README, flags=re.M | re.S)
    written = dict(re.findall(r"`(\w+)` ([\d.]+) %", paragraph))
    assert len(written) == 5
    found = results.groups(results.read(ROOT / "results"))
    assert not [name for name in found if name.startswith("cifar")]
    for arrangement, error in written.items():
        assert f"{statistics.median([record.error for record in found[f'digits/resnet110-{arrangement}']]):.2f}" == error
    fails = {True: [], False: []}  # whether the paper's does, to labels of those that do here
    for row in TABLES["digits1"].rows:
        ours = [100 if record.error is None else record.error for record in found[row.trial.name]]
        fails[row.published.error is None] += [row.published.row] if statistics.median(ours) > 20 else []
    assert len(fails[True]) == sum(row.published.error is None for row in TABLES["digits1"].rows) == 4
    assert [label.split(" (")[0] for label in fails[False]] == [
        "constant scaling",
        "shortcut-only gating",
        "shortcut-only gating",
        "1x1 convolution",
    ]


def test_accuracy_of_the_short_run_is_that_of_its_card():
    card = json.loads((ROOT / "saved_models" / "cifar10_resnet20" / "model_card.json").read_text())
    assert card["run"]["recipe"] == "cifar10_short"
    assert f"{100 * card['metrics']['accuracy']:.2f} % of the test images right" in README


def test_linked_files_exist():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_measured_figures_are_those_of_the_files():
    """The rows of the table under Benchmarks: file, candidate, figure, the number as it is written."""
    rows = re.findall(r"^\| .* \| `(\w+)\.json` `([\w/:=,]+)` (\w+)( ratio)? \| ([\d.]+) \|$", README, flags=re.M)
    assert len(rows) >= 10
    for file, candidate, figure, ratio, written in rows:
        measured = json.loads((ROOT / "training" / "benchmark" / "measured" / f"{file}.json").read_text())
        summary = measured["summary"][candidate][figure]
        value = summary["ratio"]["median"] if ratio else summary["median"]
        digits = len(written.partition(".")[2])
        assert f"{value:.{digits}f}" == written, (candidate, figure, value)
