"""Tables and pictures of several runs: what was written by hand is found there, real
runs are read, damage is named.
"""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.commands import error_of, files, run_evaluate, run_train
from training import cli
from training.compare import SUMMARY, compare
from training.config import Config
from training.recipes import RECIPES


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


METRICS = ("accuracy", "loss", "val_accuracy", "val_loss")
HISTORY = ("epoch", "iteration", *METRICS, "learning_rate", "images_per_second", "seconds")


def write_run(
    path: str,
    config: Config,
    errors,
    *,
    seconds=10.0,
    test=None,
    finished=True,
    columns=HISTORY,
    **described,
) -> Path:
    """Write a run directory by hand whose validation errors, in percent, are `errors`."""
    run = Path(path)
    run.mkdir(parents=True)
    options = {"recipe": "cifar10", "config": dataclasses.asdict(config)}
    options |= {"trainable_parameters": 272474, "versions": {"backend": "tensorflow"}}
    (run / "config.json").write_text(json.dumps(options | described, default=str))
    with (run / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        for i, error in enumerate(errors):
            rate = 1000 + 100 * i if i else "nan"
            values = (i, 390 * (i + 1), 0.5, 1.0, 1 - error / 100, 2.0, 0.1, rate)
            values += (seconds * (i + 1),)
            writer.writerow(dict(zip(HISTORY, values, strict=True)))
    if finished:
        (run / "model.keras").touch()
    if test is not None:
        (run / "metrics.json").write_text(json.dumps({"data": "cifar10", "error": test / 100}))
    return run


CIFAR = RECIPES["cifar10"]()


def changed(config: Config = CIFAR, part: str | None = None, **changes) -> Config:
    if part is not None:
        changes = {part: dataclasses.replace(getattr(config, part), **changes)}
    return dataclasses.replace(config, **changes)


def run_compare(*arguments) -> None:
    cli.main("compare", compare, list(map(str, arguments)))


def tables(text: str) -> list[list[dict[str, str]]]:
    """Return the tables of a wide terminal, each row a mapping from heading to cell."""
    found = []
    for part in text.split("Wrote ")[0].strip().split("\n\n"):
        lines = [line for line in part.splitlines() if line != SUMMARY]
        starts = [0] + [
            i + 2
            for i in range(len(lines[0]))
            if lines[0][i : i + 2] == "  " and lines[0][i + 2 : i + 3].strip()
        ]
        ends = [*starts[1:], None]
        rows = [
            [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
            for line in lines
        ]
        found.append([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    return found


def test_table(capsys):
    write_run("runs/plain", CIFAR, [50.0, 8.0, 9.0], test=8.5)
    write_run(
        "runs/gated",
        changed(part="model", shortcut="exclusive_gating", gate_bias=-6.0),
        [60, 20],
        finished=False,
    )
    write_run(
        "runs/fast",
        changed(part="optimizer", learning_rate=0.2),
        [40.0],
        seconds=100.0,
        recipe="mine",
    )
    run_compare("runs/plain", "runs/gated", "runs/fast")
    [table] = tables(capsys.readouterr().out)
    own = ("run", "recipe", "model.shortcut", "model.gate-bias", "optimizer.learning-rate")
    done = ("epochs", "iterations", "finished")
    reached = ("best held-out error %", "last held-out error %", "test error %", "time", "images/s")
    assert list(table[0]) == [*("run", "model", "parameters"), *own[1:], *done, *reached]
    assert {(row["model"], row["parameters"]) for row in table} == {
        ("cifar_resnet20_preact", "272,474")
    }
    assert ["  ".join(row[key] for key in (*own, *done, *reached)) for row in table] == [
        "plain  cifar10  -  -  0.1  3  1,170  yes  8.00  9.00  8.50  30 s  1,150",
        "gated  cifar10  exclusive_gating  -6.0  0.1  2  780  no  20.00  20.00  -  20 s  1,100",
        "fast  mine  -  -  0.2  1  390  yes  40.00  40.00  -  1 min 40 s  -",
    ]
    assert files(Path()) == sorted(
        [
            f"runs/{run}/{file}"
            for run in ("plain", "gated", "fast")
            for file in ("config.json", "history.csv")
        ]
        + ["runs/plain/metrics.json", "runs/plain/model.keras", "runs/fast/model.keras"]
    )


def test_medians_of_runs_that_differ_in_their_seed(capsys):
    for seed, last, test in ((0, 9.0, 9.5), (1, 7.0, 8.0), (2, 20.0, 30.0)):
        write_run(
            f"seed{seed}",
            changed(seed=seed),
            [last - 1, last],
            test=test,
            seconds=10.0 * (seed + 1),
        )
    write_run("seed3", changed(seed=3), [99.0], finished=False)
    other = changed(part="model", arrangement="original")
    write_run("other0", other, [10.0])
    write_run("other1", changed(other, seed=1), [11.0])
    write_run(
        "alone", changed(part="model", arrangement="original", name="cifar_resnet32_preact"), [12.0]
    )
    # another backend, another comparison
    write_run("jax", CIFAR, [5.0], versions={"backend": "jax"})
    run_compare("seed0", "other0", "seed1", "alone", "seed2", "other1", "seed3", "jax")
    out = capsys.readouterr().out
    table, groups = tables(out)
    assert [row["seed"] for row in table] == ["0", "0", "1", "0", "2", "1", "3", "0"]
    assert "seed" not in groups[0]
    figures = ("model", "model.arrangement", "backend", "n")
    figures += ("best held-out error %", "last held-out error %", "test error %", "time")
    assert [" | ".join(row[figure] for figure in figures) for row in groups] == [
        "cifar_resnet20_preact | - | tensorflow | 3 (1 not finished) | 8.00 (6.00 to 19.00) | "
        "9.00 (7.00 to 20.00) | 9.50 (8.00 to 30.00) | 40 s (20 s to 1 min 0 s)",
        "cifar_resnet20_preact | original | tensorflow | 2 | 10.50 (10.00 to 11.00) | "
        "10.50 (10.00 to 11.00) | - | 10 s",
        "cifar_resnet32_preact | original | tensorflow | 1 | 12.00 | 12.00 | - | 10 s",
        "cifar_resnet20_preact | - | jax | 1 | 5.00 | 5.00 | - | 10 s",
    ]


def test_options_that_an_older_run_does_not_have_are_those_by_default(capsys):
    """Its history has neither iterations nor times."""
    write_run("new", CIFAR, [9.0])
    old = write_run("old", changed(seed=1), [8.0], columns=("epoch", *METRICS))
    described = json.loads((old / "config.json").read_text())
    for option in ("accumulate", "checkpoint", "distribution", "batch_norm", "resume"):
        del described["config"][option]
    del described["config"]["optimizer"]["ema"], described["trainable_parameters"]
    (old / "config.json").write_text(json.dumps(described))
    run_compare("new", "old")
    table, [group] = tables(capsys.readouterr().out)
    assert table[1] == table[0] | {
        "run": "old",
        "parameters": "-",
        "seed": "1",
        "iterations": "-",
        "best held-out error %": "8.00",
        "last held-out error %": "8.00",
        "time": "-",
    }
    assert (group["n"], group["last held-out error %"], group["time"]) == (
        "2",
        "8.50 (8.00 to 9.00)",
        "10 s",
    )


def test_narrow_terminal_has_a_line_for_each_figure(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write_run("a", CIFAR, [9.0], test=9.7)
    write_run("b", changed(batch_size=64), [9.0], test=9.8)
    run_compare("a", "b")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["run", "a", "b"]
    assert ["test", "error", "%", "9.70", "9.80"] in lines
    assert max(len("  ".join(line)) for line in lines) < 80


def test_output(capsys):
    write_run("a|b/run", CIFAR, [30.0, 12.5], test=11.0)
    write_run("c/run", changed(seed=1), [20.0, 15.5])
    run_compare("a|b/run", "c/run", "./c/run", "--output", "out/deep")
    assert capsys.readouterr().out.endswith(
        "Wrote out/deep/comparison.csv, out/deep/comparison.md, out/deep/comparison.png\n"
    )
    with open("out/deep/comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # the same name in two folders; a run that was named twice
    assert [row["run"] for row in rows] == [
        "a|b/run",
        "c/run",
    ]
    assert [float(row["best_validation_error"]) for row in rows] == pytest.approx([12.5, 15.5])
    assert [
        (row["parameters"], row["seed"], row["test_error"], row["seconds"]) for row in rows
    ] == [
        ("272474", "0", "11.0", "20.0"),
        ("272474", "1", "", "20.0"),
    ]
    lines = Path("out/deep/comparison.md").read_text().splitlines()
    heading, rule, first, second, _, text, _, *groups = lines
    assert heading.count("|") == rule.count("|") == first.count("|") == second.count("|")
    assert heading.startswith("| run | model | parameters | recipe | seed |")
    assert first.startswith("| a/b/run | cifar_resnet20_preact | 272,474 | cifar10 | 0 |")
    assert text == SUMMARY
    assert "| 2 | 14.00 (12.50 to 15.50) |" in groups[2]
    with Image.open("out/deep/comparison.png") as picture:
        assert picture.size == (1210, 616)
        seen = {
            "#{:02X}{:02X}{:02X}".format(*colour)
            for _, colour in picture.convert("RGB").getcolors(1 << 24)
        }
    assert {"#0072B2", "#D55E00"} <= seen


@pytest.mark.soak
def test_real_runs(capsys):
    """Two that differ in seed and rate, of which one was evaluated."""
    options = ("--data.watch-test", "--health", "0")
    one = run_train(Path("one"), *options)
    two = run_train(Path("two"), *options, "--seed", "1", "--optimizer.learning-rate", "0.01")
    run_evaluate(one)
    capsys.readouterr()
    run_compare(one, two, "--output", "out")
    [table] = tables(capsys.readouterr().out)
    error = 100 * json.loads((one / "metrics.json").read_text())["error"]
    with open(two / "history.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert [line["model"] for line in table] == ["digits_resnet8_preact"] * 2
    assert [line["parameters"] for line in table] == ["4,934"] * 2
    assert [(line["seed"], line["optimizer.learning-rate"]) for line in table] == [
        ("0", "0.1"),
        ("1", "0.01"),
    ]
    assert [line["epochs"] for line in table] == ["1", "1"]
    assert [line["finished"] for line in table] == ["yes", "yes"]
    assert table[0]["test error %"] == table[0]["last held-out error %"] == f"{error:.2f}"
    assert table[1]["last held-out error %"] == f"{100 - 100 * float(row['val_accuracy']):.2f}"
    assert files(Path("out")) == ["comparison.csv", "comparison.md", "comparison.png"]


class TestErrors:
    def error(self, capsys, *arguments) -> str:
        return error_of(capsys, run_compare, *arguments)

    def test_no_run_is_named(self, capsys):
        assert "Name at least one run: keras-preact compare" in self.error(capsys)

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nothing", "The run directory nothing does not exist."),
            (".", ". is not a run directory: it has no config.json."),
        ],
    )
    def test_no_run(self, path, message, capsys):
        write_run("good", CIFAR, [9.0])
        assert message in self.error(capsys, "good", path, "--output", "out")
        assert not Path("out").exists()

    def test_no_history_yet(self, capsys):
        run = write_run("run", CIFAR, [])
        assert "run has no history yet: its first epoch has not ended." in self.error(capsys, "run")
        (run / "history.csv").unlink()
        assert "run has no history yet" in self.error(capsys, "run")

    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("config.json", '{"config": {'),
            ("config.json", '{"config": 3}'),
            ("config.json", '{"config": {"model": null, "seed": 1}}'),
            ("config.json", '{"config": {"optimizer": {"warp": 9}}}'),
            ("history.csv", "a picture, 3\nno number, 4\n"),
            ("metrics.json", '{"error": 0.1'),
            ("metrics.json", '{"data": "cifar10"}'),
            ("metrics.json", '{"data": "cifar10", "error": null}'),
            ("metrics.json", "[]"),
        ],
    )
    def test_damaged_file(self, file, content, capsys):
        write_run("good", CIFAR, [9.0])
        run = write_run("bad", CIFAR, [9.0], test=9.0)
        (run / file).write_text(content)
        assert f"bad/{file} is damaged" in self.error(capsys, "good", "bad", "--output", "out")
        assert not Path("out").exists()

    def test_test_error_on_other_data_is_left_out(self, capsys):
        run = write_run("run", CIFAR, [9.0], test=9.0)
        (run / "metrics.json").write_text('{"data": "digits", "error": 0.5}')
        run_compare("run")
        [[row]] = tables(capsys.readouterr().out)
        assert row["test error %"] == "-"
