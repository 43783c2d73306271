"""`keras-preact compare`: a table of several runs whose files are written by the tests."""

import csv
import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.calls import csv_rows, error_of
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
    return printed(capsys, *arguments)[0]


def printed(capsys, *arguments: str) -> tuple[list[dict[str, str]], str]:
    """Return the printed table and what follows it."""
    cli.main("compare", compare, arguments)
    text, _, notes = capsys.readouterr().out.strip().partition("\n\n")
    head, *lines = text.splitlines()
    starts = [
        i for i in range(len(head)) if head[i].strip() and not head[max(i - 2, 0) : i].strip()
    ]
    cuts = list(zip(starts, [*starts[1:], None], strict=True))
    return [{head[a:b].strip(): line[a:b].strip() for a, b in cuts} for line in lines], notes


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


def test_columns_have_the_names_of_options(capsys):
    """The field of --precision is `dtype`, the argument of the network's builder."""
    write_run("runs/full", changed("model", dtype="float32"), [8.0])
    write_run("runs/mixed", changed("model", dtype="mixed_bfloat16"), [9.0])
    rows = table(capsys, "runs/full", "runs/mixed")
    assert [row["model.precision"] for row in rows] == ["float32", "mixed_bfloat16"]


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
    rows = csv_rows("out/deep/comparison.csv")
    # the same name in two folders; a run that was named twice
    keys = ("group", "run", "parameters", "seed", "test_error", "seconds")
    assert [[row[key] for key in keys] for row in rows] == [
        ["a/run, c/run", "a/run", "272474", "0", "11.0", "20.0"],
        ["a/run, c/run", "c/run", "272474", "1", "", "20.0"],
    ]
    with Image.open("out/deep/comparison.png") as picture:
        picture.verify()


def test_json_has_the_rows_of_the_files(capsys):
    write_run("runs/a", CIFAR, [30.0, 12.5], test=11.0)
    write_run("runs/b", changed(seed=1), [20.0, 15.5])
    write_run("runs/c", changed("data", dir=Path("photos")), [20.0])
    cli.main("compare", compare, ["runs/a", "runs/b", "runs/c", "--output", "out", "--json"])
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert "Wrote out/comparison.csv, out/groups.csv, out/comparison.png" in err
    for key, name in (("runs", "comparison"), ("groups", "groups")):
        rows = csv_rows(f"out/{name}.csv")
        assert len(rows) == {"runs": 3, "groups": 2}[key]
        shown = [
            {name: "" if value is None else str(value) for name, value in row.items()}
            for row in printed[key]
        ]
        assert shown == [{k: "" if v == "nan" else v for k, v in row.items()} for row in rows]
    cli.main("compare", compare, ["runs/a", "runs/c", "--json"])
    assert json.loads(capsys.readouterr().out)["groups"] == []


GATED = changed("model", shortcut="exclusive_gating", gate_bias=-6.0)
BEST, LAST = "best epoch's test error %", "last epoch's test error %"


def write_seeds(folder, errors, config=CIFAR, **more) -> None:
    """Write a finished run for each of the last errors, as `train --seeds` does."""
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, watch_test=True))
    for seed, error in enumerate(errors):
        own = dataclasses.replace(config, seed=seed)
        write_run(f"{folder}/seed-{seed}", own, [error / 2, error], **more)


class TestGroups:
    """Runs that differ only in the seed are one row."""

    def test_table(self, capsys):
        write_seeds("runs/plain", [8.0, 9.0, 10.0, 8.5], seconds=10.0)
        write_seeds("runs/gated", [5.0, 7.0, 6.0, 7.5, 30.0], GATED)
        write_seeds("runs/fast", [4.0, 6.0], changed("optimizer", learning_rate=0.2))
        Path("runs/gated/seed-4/model.keras").unlink()  # not finished
        rows, notes = printed(capsys, "runs/plain", "runs/gated", "runs/fast")
        own = ("run", "model.shortcut", "optimizer.learning-rate", "finished", "time")
        keys = (*own, BEST, LAST, "test error %", "against the first")
        assert ["  ".join(row[key] for key in keys) for row in rows] == [
            "plain  -  0.1  4 of 4  20 s  4.38 (4.00 to 5.00)  8.75 (8.00 to 10.00)  -  -",
            "gated  exclusive_gating  0.1  4 of 5  20 s  3.25 (2.50 to 3.75)  6.50 (5.00 to 7.50)"
            "  -  lower (p = 0.029)",
            "fast  -  0.2  2 of 2  20 s  2.50 (2.00 to 3.00)  5.00 (4.00 to 6.00)  -  -",
        ]
        assert "seed" not in rows[0]
        assert f"Against the first: {LAST}, by the rank test of Mann and Whitney" in notes
        assert "4 against 4 runs cannot reach less than p = 0.029." in notes

    def test_runs_of_a_sweep(self, capsys):
        """Those without a finished epoch count: they may have diverged."""
        for depth, rate in itertools.product((8, 14), (0.1, 0.2)):
            own = changed("optimizer", learning_rate=rate)
            own = dataclasses.replace(
                own, model=changed("model", options=(f"depth={depth}",)).model
            )
            write_seeds(f"sweep/depth-{depth}/rate-{rate}", [100 * rate] * 11, own)
        bad = Path("sweep/depth-8/rate-0.2/seed-10")
        (bad / "diverged.json").write_text('{"iteration": 3}')
        for run in (bad, bad.with_name("seed-2")):
            (run / "history.csv").unlink()
            (run / "model.keras").unlink()
        rows = table(capsys, "sweep", "--output", "out")
        keys = ("run", "model.options", "optimizer.learning-rate", "finished", LAST)
        assert [[row[key] for key in keys] for row in rows] == [
            ["depth-8/rate-0.1", "depth=8", "0.1", "11 of 11", "10.00"],
            [
                "depth-8/rate-0.2",
                "depth=8",
                "0.2",
                "9 of 11, 1 diverged",
                "20.00 (20.00 to diverged)",
            ],
            ["depth-14/rate-0.1", "depth=14", "0.1", "11 of 11", "10.00"],
            ["depth-14/rate-0.2", "depth=14", "0.2", "11 of 11", "20.00"],
        ]
        [last] = table(capsys, f"{bad}")
        assert (last["epochs"], last["finished"], last[LAST]) == ("0", "diverged", "-")
        compared = [row["run"] for row in csv_rows("out/comparison.csv")]
        assert compared[:2] == [f"sweep/depth-8/rate-0.1/seed-{seed}" for seed in (0, 1)]
        assert compared[10] == "sweep/depth-8/rate-0.1/seed-10"
        message = error_of(capsys, cli.main, "compare", compare, [f"{bad.with_name('seed-2')}"])
        assert "has no history yet" in message

    def test_a_run_that_diverged_has_the_largest_error(self, capsys):
        """Without it, the runs that are left would make the row look better than it is."""
        write_seeds("runs/plain", [8.0, 9.0, 10.0], test=9.0)
        fast = changed("optimizer", learning_rate=0.2)
        write_seeds("runs/fast", [5.0, 6.0, 7.0, 7.5], fast, test=6.0)
        for seed in (1, 2, 3):
            run = Path(f"runs/fast/seed-{seed}")
            (run / "diverged.json").write_text('{"iteration": 900}')
            (run / "model.keras").unlink()
            (run / "metrics.json").unlink()
        rows, notes = printed(capsys, "runs/plain", "runs/fast", "--output", "out")
        keys = ("finished", LAST, "test error %", "time", "against the first")
        assert [rows[1][key] for key in keys] == [
            "1 of 4, 3 diverged",
            "diverged (5.00 to diverged)",
            "diverged (6.00 to diverged)",
            "20 s",
            "not clear (p = 0.4)",
        ]
        assert "A run that diverged counts too, as the largest error." in notes
        [_, row] = csv_rows("out/groups.csv")
        ends = ("median", "least", "most")
        assert [row[f"test_error_{end}"] for end in ends] == ["", "6.0", ""]
        assert (row["finished"], row["diverged"]) == ("1", "3")
        assert [row["finished"] for row in csv_rows("out/comparison.csv")[3:]] == [
            "True",
            *["diverged"] * 3,
        ]
        # a row of which no run was evaluated
        (Path("runs/fast/seed-0") / "metrics.json").unlink()
        assert table(capsys, "runs/fast")[0]["test error %"] == "-"

    def test_some_runs_are_not_evaluated(self, capsys):
        write_seeds("runs/plain", [8.0, 9.0, 10.0], test=5.0)
        Path("runs/plain/seed-1/metrics.json").unlink()
        [row] = table(capsys, "runs/plain")
        assert row["test error %"] == "5.00, 2 of 3 runs"

    def test_three_runs_each_are_never_clear(self, capsys):
        write_seeds("runs/plain", [8.0, 9.0, 10.0], test=9.0)
        write_seeds("runs/gated", [1.0, 2.0, 3.0], GATED, test=5.0)
        rows, notes = printed(capsys, "runs/plain", "runs/gated")
        assert [row["against the first"] for row in rows] == ["-", "not clear (p = 0.1)"]
        assert "Against the first: test error %, by" in notes  # every run has one
        assert "cannot reach less than p = 0.1, so they are never clear." in notes

    @pytest.mark.parametrize(
        ("second", "test", "reason"),
        [
            (GATED, "a", "a rank test needs 3 runs per row that finished or"),
            (changed("data", holdout=500), "a", "no error on the same images"),
            (changed("data", name="cifar100"), "a", "no error on the same images"),
            # two folders of images
            (changed("data", dir=Path("other")), "b", "no error on the same images"),
        ],
    )
    def test_what_is_not_tested(self, second, test, reason, capsys):
        count = 2 if second is GATED else 4
        write_seeds("runs/a", [8.0, 9.0, 10.0, 8.5][:count], hashes={"test": "a"})
        write_seeds("runs/b", [1.0, 2.0, 3.0, 4.0][:count], second, hashes={"test": test})
        rows, notes = printed(capsys, "runs/a", "runs/b")
        assert {row["against the first"] for row in rows} == {"-"}
        assert f"Against the first: not tested; {reason}" in notes.replace("the runs have ", "")

    def test_other_images_and_backends_are_other_rows(self, capsys):
        more = {"hashes": {"train": "abcdefghij"}}
        write_run("a", changed(seed=0), **more)
        write_run("b", changed(seed=1), **more)
        write_run("c", changed(seed=2), hashes={"train": "0123456789"})
        write_run("d", changed(seed=3), **more | {"versions": {"backend": "jax"}})
        rows = table(capsys, "a", "b", "c", "d")
        assert [(row["run"], row["images"], row["backend"]) for row in rows] == [
            ("a, b", "abcdefgh", "tensorflow"),
            ("c", "01234567", "tensorflow"),
            ("d", "abcdefgh", "jax"),
        ]

    @pytest.mark.parametrize("by", ["model.shortcut", "--by=--model.shortcut"])
    def test_by_one_option_alone(self, by, capsys):
        slow = changed("optimizer", learning_rate=0.05)
        write_seeds("runs/plain", [8.0, 9.0])
        write_seeds("runs/slow", [11.0], slow)
        write_run("runs/gated", GATED, [7.0])
        words = [by] if by.startswith("--") else ["--by", by]
        rows = table(capsys, "runs/plain", "runs/slow", "runs/gated", *words)
        found = [[row[key] for key in ("run", "model.shortcut", LAST)] for row in rows]
        assert found == [
            ["runs/plain/seed-0, seed-1 and 1 more", "-", "9.00 (8.00 to 11.00)"],
            ["gated", "exclusive_gating", "7.00"],
        ]
        assert "optimizer.learning-rate" not in rows[0]

    def test_an_unknown_option(self, capsys):
        write_run("a")
        message = error_of(capsys, cli.main, "compare", compare, ["a", "--by", "model.shortcat"])
        assert "Unknown option: 'model.shortcat'. Did you mean 'model.shortcut'" in message

    def test_files(self, capsys):
        write_seeds("runs/plain", [8.0, 9.0, 10.0])
        write_seeds("runs/gated", [1.0, 2.0, 3.0], GATED)
        table(capsys, "runs/plain", "runs/gated", "--output", "out")
        rows = csv_rows("out/groups.csv")
        keys = ("group", "runs", "finished", "parameters", "model.shortcut", "tested")
        assert [[row[key] for key in keys] for row in rows] == [
            ["plain", "3", "3", "272474", "", ""],
            ["gated", "3", "3", "272474", "exclusive_gating", "last_validation_error"],
        ]
        for row, expected in zip(rows, [(9, 8, 10), (2, 1, 3)], strict=True):
            found = [row[f"last_validation_error_{part}"] for part in ("median", "least", "most")]
            assert list(map(float, found)) == pytest.approx(expected)
            assert (row["test_error_median"], float(row["seconds"])) == ("", 20)
        assert float(rows[1]["p_against_the_first"]) == pytest.approx(0.1)
        compared = csv_rows("out/comparison.csv")
        assert [row["group"] for row in compared] == ["plain"] * 3 + ["gated"] * 3


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("", "", "Name at least one run"),
        ("nothing", "", "The run directory nothing does not exist"),
        (".", "", "it has no config.json"),
        ("history.csv", "epoch,loss\n", "bad has no history yet"),
        ("config.json", '{"config": {', "bad/config.json is damaged"),
        ("config.json", '{"config": {"optimizer": {"warp": 9}}}', "bad/config.json is damaged"),
        ("config.json", '{"config": {"seed": "x"}}', "bad/config.json is damaged"),
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
