"""`keras-preact reproduce rates`: which runs it trains, its files, its table and figure."""

import json

import pytest

from tests import layout
from tests.training.calls import error_of, words
from tests.training.several_runs import diverge, write_run
from training.commands.swept import depth_of
from training.reproduce import __main__ as main
from training.reproduce import rates, report

#: Loss by depth and rate; none: the run diverges.
LOSSES = {(8, 0.1): 0.4, (8, 0.2): 0.2, (14, 0.1): 0.3}


@pytest.fixture
def run_rates(several_runs):
    """Return a function that starts the command for the networks `preact`, and returns depth,
    rate and seed of the runs that were trained.
    """

    def act(config, recipe):
        loss = LOSSES.get((depth_of(config), config.optimizer.learning_rate))
        if loss is None:
            diverge(config, recipe)
        else:
            write_run(config, recipe, loss * (1 + config.seed), 100 * loss)

    def run_rates(*options: str):
        several_runs.started.clear()
        main.main(["rates", *words("--networks preact", *options)])
        return [
            (depth_of(config), config.optimizer.learning_rate, config.seed)
            for config in several_runs.started
        ]

    several_runs.act = act
    return run_rates


def test_runs_are_trained_once_written_and_shown(run_rates, several_runs, tmp_path, capsys):
    line = "--layers 14 8 --rates 0.2 0.1"
    grid = [(depth, rate, 0) for depth in (8, 14) for rate in (0.1, 0.2)]
    assert run_rates(line) == grid
    config = several_runs.started[0]
    assert (config.schedule.length, config.batch_size, config.data.watch_test) == (700, 32, True)
    assert (config.model.block, config.model.width_factor) == ("basic", 0.25)
    assert "preact-8: Best rate: 0.2 at 8 layers." in capsys.readouterr().out
    folder = tmp_path / "results/rates"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == ["preact-14.json", "preact-8.json"]
    record = json.loads(before["preact-14.json"])
    assert (record["network"], record["layers"], record["config"]["output"]) == ("preact", 14, None)
    keys = ("rate", "seed", "loss", "error", "diverged_at")
    assert [[run[key] for key in keys] for run in record["runs"]] == [
        [0.1, 0, 0.3, 30.0, None],
        [0.2, 0, None, None, 4],
    ]
    assert record["runs"][0]["device"]["name"] == "CPU"
    assert record["runs"][0]["code"] == {"commit": "0123abc"}

    # the same command, and one after a process that was killed before it wrote the file
    assert run_rates(line) == []
    assert "preact-8: kept" in capsys.readouterr().out
    (folder / "preact-8.json").rename(folder / ".preact-8-x1.json")
    assert run_rates(line) == []
    assert {path.name: path.read_bytes() for path in folder.glob("preact*")} == before
    # a rate with more digits than a measured number
    assert run_rates("--layers 14 --rates 0.3333333333333333") == [(14, 1 / 3, 0)]
    assert run_rates("--layers 14 --rates 0.3333333333333333") == []
    (folder / "preact-14.json").write_bytes(before["preact-14.json"])
    # more rates and seeds, on a machine without the run directories
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert run_rates("--layers 8 --rates 0.1 0.2 --seeds 2") == [(8, 0.1, 1), (8, 0.2, 1)]

    records = rates.read(tmp_path / "results")
    assert [record["layers"] for record in records] == [8, 14]
    assert "700 iterations" not in rates.about(records)  # these runs have 5
    assert "at 2 rates from 0.1 to 0.2, on CPU." in rates.about(records)
    rows = [line.split(" | ")[1:-1] for line in rates.table(records).splitlines()[2:]]
    assert rows == [
        ["8", "0.2", "0.3 (0.2 to 0.4)", "20.00", "0.3 (0.2 to 0.4)"],
        ["14", "0.1", "0.3", "30.00", "diverged"],
    ]
    report.report(tmp_path / "results")
    page = (tmp_path / "results/README.md").read_text()
    assert "## Learning rates by depth" in page
    assert "![Learning rates by depth](rates.svg)" in page
    assert (tmp_path / "results/rates.svg").is_file()


def test_a_file_with_other_runs_is_an_error(run_rates, several_runs, tmp_path, capsys):
    run_rates("--layers 8 --rates 0.1")
    file = tmp_path / "results/rates/preact-8.json"
    record = json.loads(file.read_text())
    record["config"]["batch_size"] = 64
    file.write_text(json.dumps(record))
    message = error_of(capsys, run_rates, "--layers 8 14 --rates 0.1 0.2")
    assert "preact-8.json has runs with another value of --batch-size: remove it" in message
    assert several_runs.started == []
    file.write_text(json.dumps(record | {"network": "other"}))
    assert "does not know" in error_of(capsys, run_rates, "--layers 8")


def test_an_interruption(run_rates, several_runs, capsys):
    """The depth that is complete is written."""
    act = several_runs.act

    def interrupt(config, recipe):
        if depth_of(config) == 14:
            raise KeyboardInterrupt
        act(config, recipe)

    several_runs.act = interrupt
    with pytest.raises(SystemExit) as ended:
        run_rates("--layers 8 14 --rates 0.1")
    assert ended.value.code == 130
    assert "The same command resumes all runs." in capsys.readouterr().out
    assert [record["layers"] for record in rates.read()] == [8]
    several_runs.act = act
    assert run_rates("--layers 8 14 --rates 0.1") == [(14, 0.1, 0)]


def test_smoke_leaves_results_alone(run_rates, several_runs, tmp_path):
    assert run_rates("--layers 8 14 20 --rates 0.1 0.2 0.4 --smoke") == [
        (depth, rate, 0) for depth in (8, 14) for rate in (0.1, 0.2)
    ]
    assert {config.schedule.length for config in several_runs.started} == {8}
    assert not (tmp_path / "results").exists()
    assert rates.read(tmp_path / "runs/reproduce/smoke/results")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers 100", "--layers must be 6n+2; the nearest are 98 and 104. Received: 100"),
        ("--layers 2", "the nearest are 8 and 14"),
        ("--rates 0.1 0", "--rates must be positive. Received: 0"),
        ("--seeds 0", "--seeds must be positive"),
    ],
)
def test_mistakes(options, message, run_rates, capsys):
    assert message in error_of(capsys, run_rates, options)


def test_figure_of_the_whole_grid():
    records = [
        {"network": network, "layers": layers, "runs": [run(rate, layers) for rate in rates.RATES]}
        for network in rates.NETWORKS
        for layers in rates.LAYERS
    ]
    figure = rates.figure(records)
    layout.check(figure)
    assert len(figure.axes) == len(rates.NETWORKS)


def run(rate, layers):
    loss = None if rate > 1 else layers * rate / 100 + 0.001 / rate
    return {"depth": layers, "rate": rate, "seed": 0, "loss": loss} | dict.fromkeys(
        ("error", "diverged_at", "seconds")
    )
