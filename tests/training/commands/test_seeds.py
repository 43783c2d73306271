"""`keras-preact train RECIPE --seeds N`: which runs it trains, and what it prints."""

import json
import shutil

import pytest

from tests.training.calls import TINY, error_of, finish, start, words
from tests.training.several_runs import diverge, write_run
from training.commands import train
from training.errors import UserError

OPTIONS = [*TINY, *words("--data.watch-test --health 0")]


@pytest.fixture
def run_seeds(several_runs):
    """Return a function that starts the command with `several_runs`. It returns the seeds of
    the runs that were trained; `fail` maps a seed to what happens in place of its run.
    """

    def act(config, recipe):
        run_seeds.started.append(config.seed)
        run_seeds.fail.get(config.seed, write_run)(config, recipe)

    def run_seeds(*options: str):
        run_seeds.started = []
        train.main(["digits", *OPTIONS, *words(*options)])
        return run_seeds.started

    run_seeds.fail = {}
    several_runs.act = act
    return run_seeds


def test_each_seed_has_a_run_and_finished_ones_are_skipped(run_seeds, tmp_path, capsys):
    line = "--seed 3 --seeds 3 --output out"
    assert run_seeds(line) == [3, 4, 5]
    described = [
        json.loads(file.read_text()) for file in sorted(tmp_path.glob("out/*/config.json"))
    ]
    assert [each["config"]["seed"] for each in described] == [3, 4, 5]
    assert all(each["config"]["resume"] for each in described)
    assert {each["recipe"] for each in described} == {"digits"}
    out = capsys.readouterr().out
    assert "3 of 3 runs are missing in out." in out
    [row] = [line for line in out.splitlines() if line.startswith("out ")]
    assert "3 of 3" in row  # one row of the table of `compare`
    assert "10.00" in row

    (tmp_path / "out/seed-4/model.keras").unlink()  # stopped at its end
    (tmp_path / "out/seed-5").rename(tmp_path / "lost")
    assert run_seeds(line) == [4, 5]
    assert "2 of 3 runs are missing in out." in capsys.readouterr().out
    assert run_seeds(line) == []

    message = error_of(capsys, run_seeds, line, "--lr 0.01")
    assert "out/seed-3 was started with another value of --lr." in message
    assert run_seeds.started == []


def test_a_run_that_fails_does_not_stop_the_others(run_seeds, capsys):
    """It is resumed by the next command. One that diverged is not: it would diverge again."""

    def fail(config, recipe):
        write_run(config, recipe)
        (config.output / "model.keras").unlink()
        raise UserError("no luck")

    run_seeds.fail = {0: fail, 1: diverge}
    for trained in ([0, 1, 2], [0]):
        with pytest.raises(SystemExit) as ended:
            run_seeds("--seeds 3 --output out")
        shown = capsys.readouterr()
        assert ended.value.code == 2
        assert "2 of 3 runs failed: seed-0, seed-1 (diverged)." in shown.err
        assert "1 of 3, 1 diverged" in shown.out  # which has no history
        assert run_seeds.started == trained


def test_a_mistake_in_the_options_is_found_before_the_first_run(run_seeds, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_seeds("--seeds 3 --output out --batch-size 0")
    out, err = capsys.readouterr()
    assert "--batch-size must be at least 1" in err
    assert "Resume" not in out
    assert run_seeds.started == []
    assert not (tmp_path / "out").exists()


def test_an_interruption_says_how_to_resume_all(run_seeds, capsys):
    def interrupt(config, recipe):
        raise KeyboardInterrupt

    run_seeds.fail = {1: interrupt}
    with pytest.raises(SystemExit) as ended:
        run_seeds("--seeds 3")
    assert (ended.value.code, run_seeds.started) == (130, [0, 1])
    last = capsys.readouterr().out.splitlines()[-1]
    resume = last.partition("Resume all runs: keras-preact ")[2].split()
    assert resume[:-2] == ["train", "digits", *OPTIONS, "--seeds", "3"]
    run_seeds.fail = {}
    run_seeds(" ".join(resume[-4:]))
    assert run_seeds.started == [1, 2]


def test_a_dry_run_describes_one(run_seeds, capsys, monkeypatch):
    found = []
    monkeypatch.setattr(train, "train", lambda config, recipe: found.append(config))
    run_seeds("--seeds 3 --dry-run")
    assert [(config.seed, config.dry_run) for config in found] == [(0, True)]
    assert capsys.readouterr().out == "Each of the 3 runs is like this one.\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seeds 0 --output new", "--seeds must be positive"),
        ("--seeds 0 --dry-run", "--seeds must be positive"),
        (
            "--seeds 2 --distribution multi_worker --output new",
            "Several runs start from one process",
        ),
        ("--seeds 2 --output taken", "taken exists and is not empty. Give another --output"),
        ("--seeds 2 --output run", "To resume the run in it: keras-preact resume run"),
    ],
)
def test_errors(options, message, run_seeds, tmp_path, capsys):
    for name in ("taken/a", "run/config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert message in error_of(capsys, run_seeds, options)
    assert run_seeds.started == []
    assert not (tmp_path / "new").exists()


@pytest.mark.process
def test_real_processes(tmp_path, run):
    """A run of the session, which was trained alone, is finished; another one is missing."""
    shutil.copytree(run, tmp_path / "out/seed-3")
    config = json.loads((run / "config.json").read_text())["config"]
    assert config["seed"] == 3
    line = ["--config", "out/seed-3", "--seeds", "2", "--output", "out"]
    process = start("-m", "training", "train", *line, cwd=tmp_path)
    status, out, err = finish(process)
    assert status == 0, err
    assert "1 of 2 runs are missing in out." in out
    assert "2 of 2" in out
    assert (tmp_path / "out/seed-4/model.keras").is_file()
