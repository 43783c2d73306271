"""`keras-preact compare`: a table of several runs whose files are written by the tests."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.calls import error_of
from training import cli
from training.commands.compare import compare
from training.config import Config
from training.recipes import RECIPES


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")


HISTORY = (
    *("epoch", "accuracy", "loss", "val_accuracy", "val_loss"),
    *("iteration", "learning_rate", "images_per_second", "seconds"),
)
CIFAR = RECIPES["cifar10"]()


def write_run(path, config=CIFAR, errors=(9.0,), *, seconds=10.0, test=None, **described) -> Path:
    """Write a run directory whose validation errors, in percent, are `errors`."""
    run = Path(path)
    run.mkdir(parents=True)
    options = {"recipe": "cifar10", "config": dataclasses.asdict(config)}
    options |= {"trainable_parameters": 272474, "versions": {"backend": "tensorflow"}}
    (run / "config.json").write_text(json.dumps(options | described, default=str))
    rows = [HISTORY]
    for i, error in enumerate(errors):
        last = (390 * (i + 1), 0.1, 1000 + 100 * i if i else "nan", seconds * (i + 1))
        rows.append((i, 0.5, 1.0, 1 - error / 100, 2.0, *last))
    with (run / "history.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (run / "model.keras").touch()
    if test is not None:
        (run / "metrics.json").write_text(json.dumps({"data": "cifar10", "error": test / 100}))
    return run


def changed(part: str | None = None, **changes) -> Config:
    if part is not None:
        changes = {part: dataclasses.replace(getattr(CIFAR, part), **changes)}
    return dataclasses.replace(CIFAR, **changes)


def table(capsys, *arguments: str) -> list[dict[str, str]]:
    """Return the printed table; each row maps a heading to a cell."""
    cli.main("compare", compare, arguments)
    head, *lines = capsys.readouterr().out.split("\nWrote ")[0].strip().splitlines()
    starts = [
        i for i in range(len(head)) if head[i].strip() and not head[max(i - 2, 0) : i].strip()
    ]
    cuts = list(zip(starts, [*starts[1:], None], strict=True))
    return [{head[a:b].strip(): line[a:b].strip() for a, b in cuts} for line in lines]


def test_table(capsys):
    write_run("runs/plain", CIFAR, [50.0, 8.0, 9.0], test=8.5)
    gated = changed("model", shortcut="exclusive_gating", gate_bias=-6.0)
    (write_run("runs/gated", gated, [60, 20]) / "model.keras").unlink()  # not finished
    fast = changed("optimizer", learning_rate=0.2)
    run = write_run("runs/fast", fast, [40.0], seconds=100.0, recipe="mine", test=9.0)
    (run / "metrics.json").write_text('{"data": "digits", "error": 0.5}')  # says nothing here
    rows = table(capsys, "runs/plain", "runs/gated", "runs/fast")
    own = ("run", "recipe", "model.shortcut", "model.gate-bias", "optimizer.learning-rate")
    done = ("epochs", "iterations", "finished")
    reached = (
        "best epoch's test error %",
        "last epoch's test error %",
        "test error %",
        "time",
        "images/s",
    )
    assert list(rows[0]) == ["run", "model", "parameters", *own[1:], *done, *reached]
    assert ["  ".join(row[key] for key in (*own, *done, *reached)) for row in rows] == [
        "plain  cifar10  -  -  0.1  3  1,170  yes  8.00  9.00  8.50  30 s  1,150",
        "gated  cifar10  exclusive_gating  -6.0  0.1  2  780  no  20.00  20.00  -  20 s  1,100",
        "fast  mine  -  -  0.2  1  390  yes  40.00  40.00  -  1 min 40 s  -",
    ]


def test_errors_name_the_images_that_they_are_measured_on(capsys):
    write_run("runs/watches_test", changed("data", watch_test=True), [8.0])
    write_run("runs/holds_out", changed("data", holdout=500), [9.0])
    assert "best epoch's held-out error %" in table(capsys, "runs/holds_out")[0]
    assert (
        "best epoch's held-out or test error %"
        in table(capsys, "runs/holds_out", "runs/watches_test")[0]
    )


def test_output(capsys):
    write_run("a/run", CIFAR, [30.0, 12.5], test=11.0)
    write_run("c/run", changed(seed=1), [20.0, 15.5])
    table(capsys, "a/run", "c/run", "./c/run", "--output", "out/deep")
    with open("out/deep/comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # the same name in two folders; a run that was named twice
    keys = ("run", "parameters", "seed", "test_error", "seconds")
    assert [[row[key] for key in keys] for row in rows] == [
        ["a/run", "272474", "0", "11.0", "20.0"],
        ["c/run", "272474", "1", "", "20.0"],
    ]
    with Image.open("out/deep/comparison.png") as picture:
        picture.verify()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("", "", "Name at least one run"),
        ("nothing", "", "The run directory nothing does not exist"),
        (".", "", "it has no config.json"),
        ("history.csv", "epoch,loss\n", "bad has no history yet"),
        ("config.json", '{"config": {', "bad/config.json is damaged"),
        ("config.json", '{"config": {"optimizer": {"warp": 9}}}', "bad/config.json is damaged"),
        ("history.csv", "a picture, 3\nno number, 4\n", "bad/history.csv is damaged"),
        ("metrics.json", '{"data": "cifar10", "error": null}', "bad/metrics.json is damaged"),
    ],
)
def test_errors(file, content, message, capsys):
    write_run("good")
    named = ("good", file) if file else ()
    if content:
        (write_run("bad", test=9.0) / file).write_text(content)
        named = ("good", "bad")
    assert message in error_of(capsys, cli.main, "compare", compare, [*named, "--output", "out"])
    assert not Path("out").exists()
