"""`keras-preact sweep`: which runs it trains, and what it prints and writes about them."""

import dataclasses
import math

import numpy as np
import pytest

from tests import layout
from tests.training.calls import TINY, csv_rows, error_of, finish, start, words
from tests.training.several_runs import diverge, write_run
from training.commands import sweep, swept, train
from training.commands.swept import Point
from training.config import Config
from training.errors import UserError

OPTIONS = [*TINY, *words("--data.watch-test --health 0")]
#: Loss and error by depth and rate; none: the run diverges.
VALLEY = {
    (8, 0.1): (0.4, 5.0),
    (8, 0.2): (0.2, 7.0),
    (14, 0.1): (0.3, 6.0),
}


@pytest.fixture
def run_sweep(several_runs):
    """Return a function that starts the command and returns the directories of the runs
    that were trained, whose losses are those of `VALLEY`.
    """

    def act(config, recipe):
        key = swept.depth_of(config), config.optimizer.learning_rate
        if key in VALLEY:
            loss, error = VALLEY[key]
            write_run(config, recipe, loss * (1 + config.seed), error)
        else:
            diverge(config, recipe)

    def run_sweep(*options: str):
        several_runs.started.clear()
        sweep.main(["digits", *OPTIONS, *words(*options)])
        return [str(config.output) for config in several_runs.started]

    several_runs.act = act
    return run_sweep


def test_every_rate_at_every_depth(run_sweep, several_runs, tmp_path, capsys):
    """Each run is what `train` makes of the same options."""
    line = "--depths 14 8 --rates 0.2 0.1 0.2 --output out"
    grid = [f"out/depth-{depth}/rate-{rate}/seed-0" for depth in (8, 14) for rate in (0.1, 0.2)]
    assert run_sweep(line) == grid
    found = dataclasses.replace(several_runs.started[3], output=None, resume=False)
    expected = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", lambda config, _: expected.append(config))
        train.main(["digits", *OPTIONS, *words("--model.options depth=14 --lr 0.2")])
    assert [found] == expected

    shown = capsys.readouterr().out.splitlines()
    assert "4 of 4 runs are missing in out." in shown
    [head, *lines] = shown[shown.index("") :][-7:-4]
    assert head.split("  ")[0] == "layers"
    assert [line.split() for line in lines] == [
        ["8", "0.4", "(5.00", "%)", "0.2", "(7.00", "%)", "*"],
        ["14", "0.3", "(6.00", "%)", "*", "diverged"],
    ]
    assert "in brackets the test error" in shown[-3]
    assert shown[-2] == (
        "Best rate: 0.2 at 8 layers, 0.1 at 14. Extend --rates below 0.1. Extend --rates above 0.2."
    )
    assert shown[-1] == "Wrote out/sweep.csv, out/sweep.png"
    keys = ("run", "depth", "rate", "seed", "loss", "diverged_at")
    rows = [[row[key] for key in keys] for row in csv_rows("out/sweep.csv")]
    assert rows[0] == ["depth-8/rate-0.1/seed-0", "8", "0.1", "0", "0.4", ""]
    assert rows[3] == ["depth-14/rate-0.2/seed-0", "14", "0.2", "0", "", "4"]
    assert (tmp_path / "out/sweep.png").is_file()

    # the same command: nothing. More rates and seeds: those that are missing
    assert run_sweep(line) == []
    (tmp_path / "out/depth-8/rate-0.1/seed-0/model.keras").unlink()
    assert run_sweep(line) == grid[:1]
    assert run_sweep("--depths 8 --rates 0.1 --seeds 2 --output out") == [grid[0][:-1] + "1"]
    assert "0.6 (5.00 %)" in capsys.readouterr().out  # the median of 0.4 and 0.8
    message = error_of(capsys, run_sweep, line, "--batch 32")
    assert "was started with another value of --batch" in message


def test_depths_are_checked_before_the_first_run(run_sweep, several_runs, tmp_path, capsys):
    for options, message in (
        ("--depths 8 21", "cannot have --depths 21: `depth` must be 6n+2"),
        (
            "--depths 8 14 --model.name cifar_fast_resnet8",
            "cifar_fast_resnet8 cannot have --depths",
        ),
        ("--depths 8 14 --model.name digits_resnet7", "Unknown name"),
        ("--depths 0", "--depths must be positive. Received: 0"),
        ("--rates 0.1 -1", "--rates must be positive. Received: -1"),
        ("--seeds 0", "--seeds must be positive"),
        ("--depths 8 --data.dir a --model.weights a", "--depths builds new networks"),
    ):
        assert message in error_of(capsys, run_sweep, "--output new", options)
        assert several_runs.started == []
        assert not (tmp_path / "new").exists()
    several_runs.checked = 0
    run_sweep("--depths 8 14 --rates 0.1 --precision auto --output new")
    run_sweep("--depths 8 14 --rates 0.1 0.2 --precision auto --output new")
    assert several_runs.checked == 1  # depths that have run fit


def test_without_depths_and_rates_it_surrounds_the_rate_of_the_recipe(run_sweep, several_runs):
    several_runs.act = write_run
    assert run_sweep("--output out") == [
        f"out/rate-{rate}/seed-0" for rate in ("0.025", "0.05", "0.1", "0.2", "0.4")
    ]
    assert all(config.model.options == () for config in several_runs.started)
    assert run_sweep("--lr 1 --output one")[0] == "one/rate-0.25/seed-0"


def test_a_run_that_fails_is_left_out(run_sweep, several_runs, capsys):
    act = several_runs.act

    def fail(config, recipe):
        act(config, recipe)
        if config.optimizer.learning_rate == 0.2:
            (config.output / "model.keras").unlink()
            raise UserError("no luck")

    several_runs.act = fail
    with pytest.raises(SystemExit) as ended:
        run_sweep("--depths 8 --rates 0.1 0.2 0.4 --output out")
    assert ended.value.code == 2
    assert "1 of 3 runs failed: depth-8/rate-0.2/seed-0." in capsys.readouterr().err
    assert [row["rate"] for row in csv_rows("out/sweep.csv")] == ["0.1", "0.4"]


def test_runs_are_trained_at_the_same_time(run_sweep, several_runs, capsys):
    assert len(run_sweep("--depths 8 --rates 0.1 0.2 0.4 --parallel 2 --output out")) == 3
    assert several_runs.together == [2, 1]
    shown = capsys.readouterr().out
    assert "depth-8/rate-0.1/seed-0, depth-8/rate-0.2/seed-0, run 1, 2 of 3:" in shown
    assert "depth-8/rate-0.4/seed-0, run 3 of 3, at most about 0 s left:" in shown
    assert "--parallel must be positive" in error_of(capsys, run_sweep, "--parallel 0")


def test_messages_of_parallel_runs_are_in_files(tmp_path, monkeypatch, capsys):
    """A second attempt adds to the file."""
    config = Config(output=tmp_path / "rate-0.1/seed-0")
    monkeypatch.setattr(train, "train", lambda config, recipe: print(f"Training {recipe}"))
    for logs in (False, True, True):
        train._train_one_of_several("digits", config, logs)
    assert capsys.readouterr().out == "Training digits\n"
    assert (tmp_path / "rate-0.1/seed-0.log").read_text() == 2 * "Training digits\n"


def test_an_interruption_says_how_to_resume_all(run_sweep, several_runs, capsys):
    def interrupt(config, recipe):
        raise KeyboardInterrupt

    several_runs.act = interrupt
    with pytest.raises(SystemExit) as ended:
        run_sweep("--rates 0.1 0.2 --optimizer.nesterov")
    assert (ended.value.code, len(several_runs.started)) == (130, 1)
    last = capsys.readouterr().out.splitlines()[-1]
    line = last.partition("Resume all runs: keras-preact sweep ")[2].split()
    assert line[:-2] == ["digits", *OPTIONS, *words("--rates 0.1 0.2 --optimizer.nesterov")]
    assert line[-2] == "--output"


def test_a_dry_run_describes_each_depth(run_sweep, several_runs, tmp_path, capsys):
    several_runs.act = lambda config, recipe: None
    run_sweep("--depths 8 14 --rates 0.1 0.2 --seeds 3 --dry-run --output out")
    assert [config.model.options for config in several_runs.started] == [
        ("depth=8",),
        ("depth=14",),
    ]
    assert all(config.dry_run for config in several_runs.started)
    assert capsys.readouterr().out == "Runs like each of these: 6.\n"
    assert not (tmp_path / "out").exists()


def test_the_last_tenth_of_a_run():
    """Of epochs of 7 iterations, and a last one of 2: the mean of the last three."""
    losses = np.arange(30.0)
    ends = np.array([7, 14, 21, 28, 30])
    means = [losses[a:b].mean() for a, b in zip([0, *ends], ends, strict=False)]
    found = swept.final_loss({"loss": np.array(means), "iteration": ends})
    # the epoch before the last one counts with one of its seven iterations
    assert found == pytest.approx((losses[21:28].mean() + 28 + 29) / 3)


def test_medians_and_best_rates():
    points = [Point(8, 0.1, seed, loss) for seed, loss in enumerate((0.3, 0.1, None))]
    points += [Point(8, 0.2, seed, loss) for seed, loss in enumerate((None, 0.1, None))]
    points += [Point(None, 0.2, 0, None)]
    assert swept.medians(points) == {None: {0.2: math.inf}, 8: {0.1: 0.3, 0.2: math.inf}}
    assert swept.best({0.1: 0.3, 0.2: 0.2, 0.4: math.inf}) == 0.2
    assert swept.best({0.1: math.inf}) is None
    inner = [Point(8, rate, 0, loss) for rate, loss in ((0.1, 2), (0.2, 1), (0.4, 3))]
    assert swept.sentence(inner) == "Best rate: 0.2 at 8 layers."
    failed = [Point(1001, 0.1, 0, None), Point(20, 0.1, 0, 1.0)]
    assert swept.sentence(failed) == (
        "Best rate: 0.1 at 20 layers, none at 1,001 (all runs diverged). Extend --rates below 0.1."
    )


@pytest.mark.parametrize("grid", [(0.0125 * 2**i for i in range(8)), [0.1]])
def test_figure(grid):
    grid = list(grid)
    points = [
        Point(depth, rate, 0, None if depth * rate > 300 else depth / 100 + (rate - 0.1) ** 2)
        for depth in (20, 56, 110, 506)
        for rate in grid
    ]
    figure = swept.figure({"x + F": points, "scaled": points}, "Title")
    layout.check(figure)
    one = figure.axes[0]
    if len(grid) == 1:  # the loss by depth
        [line] = one.lines
        assert list(line.get_xdata()) == [20, 56, 110, 506]
        return
    curves, stars = one.lines[::2], one.lines[1::2]
    assert [list(star.get_xdata()) for star in stars] == [[0.1]] * 4
    assert len({curve.get_color() for curve in curves}) == 4
    assert np.isnan(curves[-1].get_ydata()[-1])  # diverged
    assert one.get_xscale() == "log"


def test_a_single_run_is_drawn_at_its_rate():
    """The depth of the recipe is no number."""
    figure = swept.figure({"": [Point(None, 0.1, 0, 0.5)]}, "Title")
    layout.check(figure)
    curve, star = figure.axes[0].lines
    assert curve.get_xydata().tolist() == star.get_xydata().tolist() == [[0.1, 0.5]]


@pytest.mark.process
def test_the_process_that_checks_the_depths(tmp_path):
    """Those that train are the same as for --seeds."""
    line = words("sweep digits --depths 8 21 --rates 0.1 --output out")
    status, out, err = finish(start("-m", "training", *line, cwd=tmp_path))
    assert (status, out) == (2, "Checking the networks of --depths 8 21.\n")
    assert "error: digits_resnet20_preact cannot have --depths 21: `depth` must be 6n+2" in err
    assert not (tmp_path / "out").exists()
