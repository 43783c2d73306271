"""The best learning rate at each depth, with and without branches that are scaled for the
depth: the command, its files, table and figure.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from .. import disk
from ..cli.terminal import markdown
from ..commands import several, sweep, swept
from ..commands.swept import Point
from ..config import Config, Model, differences, from_json
from ..directory import runs
from ..errors import UserError, check_positive, command, reading
from ..ranks import spread
from .depth import in_order
from .results import RESULTS, WORK

FORMAT = 1
#: Each is 6n+2, for three stages of n basic units.
LAYERS = (20, 56, 110, 218, 506)
RATES = tuple(0.0125 * 2**i for i in range(8))
#: Measurements of the test images in a run. The last two are the last tenth of the run.
MEASUREMENTS = 20


@dataclasses.dataclass(frozen=True)
class Network:
    """A kind of network, at any depth.

    Args:
        label: Its name in table and figure.
        options: Options of --model in which it differs from the others.
    """

    label: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _scaled(power: float) -> Mapping[str, Any]:
    return {"shortcut": "depth_scaling", "shortcut_options": (f"power={power:g}",)}


Name = Literal["preact", "depth_scaling_0.5", "depth_scaling_1"]

NETWORKS: Mapping[Name, Network] = {
    "preact": Network("pre-activation"),
    "depth_scaling_0.5": Network("depth scaling, power 0.5", _scaled(0.5)),
    "depth_scaling_1": Network("depth scaling, power 1", _scaled(1)),
}


def rates(
    layers: tuple[int, ...] = LAYERS,
    networks: tuple[Name, ...] = tuple(NETWORKS),
    rates: tuple[float, ...] = RATES,
    seeds: int = 1,
    parallel: int = 1,
    smoke: bool = False,
    output: Path = RESULTS,
    work: Path = WORK,
) -> None:
    """Train networks of 20 to 506 layers on digits at eight learning rates.

    The networks are ResNets with full pre-activation and a quarter of the channels, in
    the recipe of the small tables: 700 iterations of 32 digits. Each run has its own
    process, and the same command resumes all runs. The runs of a network and a depth have
    a file, OUTPUT/rates/NETWORK-LAYERS.json. Runs in files that exist are kept.

    Args:
        layers: Numbers of layers, each 6n+2: three stages of n basic units.
        networks: Networks. depth_scaling_0.5 and depth_scaling_1 multiply F by 9 over the
            number of units, to this power: with 20 layers all are the same network.
        rates: Learning rates.
        seeds: Number of runs for each network, depth and rate, with seeds 0, 1, ...
        parallel: Number of runs to train at the same time. Their messages then go to files
            such as WORK/rates/preact/depth-56/rate-0.1/seed-0.log.
        smoke: Train eight steps at two depths and two rates, to check the setup.
        output: Folder of the results.
        work: Folder of the run directories.

    Raises:
        UserError: for options that do not fit, or a file with other runs; nothing is
            trained then. At the end, if runs failed.
    """
    check_positive(seeds=seeds, parallel=parallel)
    for rate in rates:
        check_positive(rates=rate)
    layers = in_order(layers, 6)
    if smoke:
        layers, networks, rates = layers[:2], networks[:1], rates[:2]
        work = work / "smoke"
        output = work / "results"
        shutil.rmtree(work, ignore_errors=True)
    missing = {}
    for count, network in itertools.product(layers, dict.fromkeys(networks)):
        file = output / "rates" / f"{network}-{count}.json"
        config = _config(network, count, smoke)
        every = sweep.grid(config, work / "rates" / network, [count], rates, seeds)
        measured = {(run["rate"], run["seed"]) for run in _kept(file, config)}
        new = [each for each in every if (each.optimizer.learning_rate, each.seed) not in measured]
        if new:
            missing[file] = new
        else:
            print(f"{file.stem}: kept, {file}")

    def write(_: object = None) -> None:
        for file in [file for file, new in missing.items() if all(map(several.has_ended, new))]:
            _write(file, missing.pop(file))

    configs = [config for new in missing.values() for config in new]
    disk.make(output, "--output")
    disk.make(work, "--work")
    write()  # what an interrupted command has left
    again = "The same command resumes all runs."
    failed = several.train_all(configs, "small", work / "rates", again, parallel, swept.size, write)
    if failed:
        raise UserError(f"{len(failed)} of {len(configs)} runs failed: {', '.join(failed)}")


def _config(network: Name, layers: int, smoke: bool) -> Config:
    """Return the configuration of the runs of a network, up to rate and seed."""
    from .trials import Trial  # brings Keras

    model = Model(
        "cifar_resnet20_preact",
        block="basic",
        width_factor=0.25,
        options=(f"depth={layers}",),
        **NETWORKS[network].options,
    )
    return Trial("digits/rates", "small", model, MEASUREMENTS).config(0, smoke=smoke)


def _kept(file: Path, config: Config) -> list[dict[str, Any]]:
    """Return the runs in a file, none if it does not exist.

    Raises:
        UserError: if they differ from `config` in more than rate and seed.
    """
    if not file.exists():
        return []
    record = _read(file)
    ignored = ("--seed", "--optimizer.learning-rate")
    if different := differences(from_json(Config, record["config"]), config, ignored):
        raise UserError(
            f"{file} has runs with another value of {', '.join(different)}: remove it, or give "
            "another --output."
        )
    return record["runs"]


def _write(file: Path, new: Sequence[Config]) -> None:
    """Add runs that have ended to a file."""
    found = _kept(file, new[0])
    for config in new:
        described = runs.read_config(several.directory(config))
        about = {key: described[key] for key in ("device", "code", "versions")}
        found.append(dataclasses.asdict(swept.measured(config)) | about)
    network, _, layers = file.stem.rpartition("-")
    record = {
        "format": FORMAT,
        "network": network,
        "layers": int(layers),
        "iterations": described["iterations"],
        "config": runs.portable(described["config"]),
        "data": {key: described[key] for key in ("images", "hashes")},
        "runs": sorted(found, key=lambda run: (run["rate"], run["seed"])),
    }
    disk.make(file.parent)
    # what is compared with the options of later runs keeps all digits
    written = disk.plain(record, digits=6, exact=("config", "rate"))
    disk.write_json(file, written, indent=None)
    print(f"\n{file.stem}: {swept.sentence(_points(record))} Written: {file}", flush=True)


def read(folder: Path = RESULTS) -> list[dict]:
    """Return the files in a folder of results, sorted by network and depth.

    Raises:
        UserError: for a file that holds no such runs.
    """
    order = list(NETWORKS)
    # hidden files are half-written: their process was killed
    records = [_read(file) for file in (folder / "rates").glob("[!.]*.json")]
    return sorted(records, key=lambda record: (order.index(record["network"]), record["layers"]))


def _read(file: Path) -> dict:
    with reading(f"{file} holds no runs of `rates`"):
        record = json.loads(file.read_text())
        known = record["format"] == FORMAT and record["network"] in NETWORKS and record["runs"]
    if not known:
        raise UserError(f"{file} has a format or a network that this version does not know.")
    return record


def _points(record: Mapping[str, Any]) -> list[Point]:
    names = [field.name for field in dataclasses.fields(Point)]
    return [Point(**{name: run[name] for name in names}) for run in record["runs"]]


def best_rate(record: Mapping[str, Any]) -> float | None:
    """Return the rate with the smallest median loss of a network at a depth; None if all
    runs diverged.
    """
    [losses] = swept.medians(_points(record)).values()
    return swept.best(losses)


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table: best rate by network and depth, and what it costs to keep
    the rate of the shallowest network.
    """
    head = ["network", "layers", "best rate", "training loss", "test error"]
    rows = [[*head, "training loss at the best rate of the first depth", "n"]]
    first: dict[str, float | None] = {}
    for record in records:
        points, network = _points(record), record["network"]
        best = best_rate(record)
        kept = first.setdefault(network, best)
        at_best = [point for point in points if point.rate == best]
        cells = [
            "none" if best is None else f"{best:g}",
            _spread([point.loss for point in at_best], ".3g"),
            _spread([point.error for point in at_best], ".2f"),
            _spread([point.loss for point in points if point.rate == kept], ".3g"),
        ]
        seeds = len({point.seed for point in points})
        rows.append([NETWORKS[network].label, f"{record['layers']:,}", *cells, str(seeds)])
    return markdown(rows)


def _spread(values: Sequence[float | None], digits: str) -> str:
    return spread(values, digits) if values else "-"


def about(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how the networks were trained."""
    rates = sorted({run["rate"] for record in records for run in record["runs"]})
    machines = sorted({run["device"]["name"] for record in records for run in record["runs"]})
    return (
        f"`{command('reproduce')} rates`. ResNets with full pre-activation, basic units and a "
        f"quarter of the channels, on digits, with the recipe of the small tables: "
        f"{records[0]['iterations']} iterations, at {len(rates)} rates from {rates[0]:g} to "
        f"{rates[-1]:g}, on {' and '.join(machines)}. With depth scaling, F is multiplied by 9 "
        "over the number of units, to this power, and the rate of the branches follows "
        "(`kp.optimizers.depth_rates`): with 20 layers, all networks are the same. The best rate "
        "has the smallest training loss over the last tenth of the run; the test error is from the "
        "last iteration. Numbers are medians of n runs, in brackets the range. The last losses "
        "show the cost of the rate that is best for the shallowest network (arXiv 2309.16620, "
        "2505.01618)."
    )


def figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the losses: a panel per network, a curve per depth.

    Raises:
        ImportError: without matplotlib.
    """
    panels: dict[str, list[Point]] = {}
    for record in records:
        panels.setdefault(NETWORKS[record["network"]].label, []).extend(_points(record))
    return swept.figure(panels, "Training loss by learning rate and depth (star: the best rate)")
