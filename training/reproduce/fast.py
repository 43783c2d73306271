"""CIFAR-10 in minutes: the recipe `cifar10_fast` with several seeds, its files and its
table.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import backends, children, histories, runs
from ..cli import UserError
from ..config import Config, differences, from_json
from ..terminal import duration, markdown
from . import medians, results
from .results import RESULTS, SEEDS, WORK

RECIPE = "cifar10_fast"
FORMAT = 1
#: Keys of metrics.json that are kept.
KEPT = ("images", "accuracy", "loss", "calibration_error")
#: Views that the table shows, with their headings.
SHOWN: Mapping[str, str] = {"one": "test accuracy", "flip_shift": "with 6 views"}


def fast(
    seeds: int = SEEDS,
    options: tuple[str, ...] = (),
    data: Path | None = None,
    output: Path = RESULTS,
    work: Path = WORK,
) -> None:
    """Train the recipe cifar10_fast with several seeds, and measure each on the test
    images.

    Each run has a file, OUTPUT/cifar10_fast/seed-N.json; what is there already is kept.
    Interrupted runs are resumed.

    Args:
        seeds: Number of runs, with seeds 0, 1, ...
        options: Options of `keras-preact train` for every run, such as "--epochs 2", each
            with its value in quotes.
        data: Data directory of TensorFlow Datasets.
        output: Folder for the results.
        work: Folder of the run directories.

    Raises:
        UserError: for a run that fails, and for results with other options.
    """
    if seeds < 1:
        raise UserError(f"--seeds must be positive. Received: {seeds}")
    folder = output / RECIPE
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        file = folder / f"seed-{seed}.json"
        if file.exists():
            print(f"seed {seed}: kept, {file}", flush=True)
            continue
        record = _measured(work / RECIPE / f"seed-{seed}", seed, options, data)
        _check_same([*read(output), record])
        runs.write_json(file, runs.plain(record, digits=7), indent=None)
        accuracy = 100 * record["views"]["flip_shift"]["accuracy"]
        print(f"seed {seed}: accuracy {accuracy:.2f} % with 6 views. Written: {file}", flush=True)


def _measured(run: Path, seed: int, options: Sequence[str], data: Path | None) -> dict[str, Any]:
    """Train a run, or resume it, and return its record."""
    run.parent.mkdir(parents=True, exist_ok=True)
    words = [word for option in options for word in option.split()]
    words += ["--data.dir", str(data.absolute())] if data is not None else []
    _command("train", RECIPE, *words, "--seed", str(seed), "--output", str(run), "--resume")
    views = {}
    for name in SHOWN:
        folder = run / "views" / name
        _command("evaluate", str(run), "--views", name, "--output", str(folder))
        metrics = json.loads((folder / "metrics.json").read_text())
        views[name] = {key: metrics[key] for key in KEPT}
    return record_of(run, views)


def record_of(run: Path, views: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the record of a finished run with what was measured of its views."""
    described = runs.read_config(run)
    history = histories.read(run / "history.csv")
    return {
        "format": FORMAT,
        "seed": described["config"]["seed"],
        "config": results.portable(described["config"]),
        "code": described["code"],
        "parameters": described["trainable_parameters"],
        "device": backends.described(),
        "seconds": float(history["seconds"][-1]),
        "images_per_second": medians.median(history["images_per_second"].tolist()),
        "curves": {name: history[name].tolist() for name in ("epoch", "loss", "accuracy")},
        "views": views,
    }


def _command(*words: str) -> None:
    package = __package__.split(".")[0]
    environment = children.environment(backends.described()["backend"])
    done = subprocess.run([sys.executable, "-m", package, *words], env=environment)
    if done.returncode:
        raise UserError(
            f"`keras-preact {' '.join(words)}` ended with status {done.returncode}. The same "
            "command resumes what was interrupted."
        )


def read(folder: Path = RESULTS) -> list[dict]:
    """Return the records below a folder of results, by seed.

    Raises:
        UserError: for a file that holds none.
    """
    found = []
    for file in (folder / RECIPE).glob("seed-*.json"):
        try:
            record = json.loads(file.read_text())
            known = record["format"] == FORMAT
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise UserError(f"{file} holds no run of {RECIPE}: {error!r}") from error
        if not known:
            raise UserError(f"{file} has a format that this version does not know.")
        found.append(record)
    return sorted(found, key=lambda record: record["seed"])


def _check_same(records: Sequence[Mapping[str, Any]]) -> None:
    first, *others = (from_json(Config, record["config"]) for record in records)
    for other in others:
        if different := differences(first, other, results.IGNORED):
            raise UserError(
                f"The runs of {RECIPE} must be equal except for the seed. Seeds {first.seed} and "
                f"{other.seed} differ in {', '.join(different)}. Give another --output."
            )


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the runs as a Markdown table, a row for each device and precision."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        device = record["device"]
        name = device["cpu"] if device["name"] == "CPU" else device["name"]
        precision = record["config"]["model"]["dtype"] or "float32"
        groups.setdefault((f"{name} ({device['backend']})", precision), []).append(record)
    rows = [
        ["device", "precision", "n", "training", "images/s", *SHOWN.values(), "calibration error"]
    ]
    for (device, precision), own in sorted(groups.items()):
        rows.append(
            [
                device,
                precision,
                str(len(own)),
                duration(medians.median([record["seconds"] for record in own]) or 0),
                f"{medians.median([record['images_per_second'] for record in own]) or 0:,.0f}",
                *(_percent(own, name, "accuracy") for name in SHOWN),
                _percent(own, "one", "calibration_error"),
            ]
        )
    return markdown(rows)


def figure(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the accuracy of each run into a PNG file: on the training images epoch by
    epoch, on the test images at the end.

    Raises:
        ImportError: without matplotlib.
    """
    from keras_preact.analysis.figures import style

    picture = style.new_figure(7.2, 4.4)
    style.heading(picture, "CIFAR-10 in minutes: accuracy of each run")
    axes = style.styled(picture.subplots(), "", "Epoch", "Accuracy (%)")
    looks: dict[str, dict[str, Any]] = {
        "training images, augmented": {"color": style.GREY, "linewidth": 1.4},
        **{
            words: {"color": style.colour(i), "marker": "D", "linestyle": "none"}
            for i, words in enumerate(SHOWN.values())
        },
    }
    training, *tests = looks.values()
    for record in records:
        epochs = [1 + epoch for epoch in record["curves"]["epoch"]]
        axes.plot(epochs, [100 * share for share in record["curves"]["accuracy"]], **training)
        for views, look in zip(SHOWN, tests, strict=True):
            axes.plot(epochs[-1:], [100 * record["views"][views]["accuracy"]], **look)
    style.legend(picture, {words: style.sample(look) for words, look in looks.items()})
    picture.savefig(path, format="png", dpi=110)


def _percent(records: Sequence[Mapping[str, Any]], views: str, key: str) -> str:
    values = [100 * record["views"][views][key] for record in records]
    spread = medians.std(values)
    return f"{medians.mean(values):.2f} %" + ("" if spread is None else f" +- {spread:.2f}")
