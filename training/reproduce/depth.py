"""How far signals reach in networks of up to ten thousand layers before training: the
command, its files, table and figure.
"""

import fractions
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from .. import backends, children, disk
from ..cli.terminal import markdown
from ..errors import UserError, command, reading
from ..run import limits
from .profiles import FORMAT, NETWORKS, Name, settings_of
from .results import RESULTS

#: Each is 9n+2, for three stages of n bottlenecks.
LAYERS = (20, 56, 110, 164, 506, 1001, 10_001)


def depth(
    layers: tuple[int, ...] = LAYERS,
    networks: tuple[Name, ...] = tuple(NETWORKS),
    batch: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 16,
    seed: int = 0,
    limit: float = 3600,
    smoke: bool = False,
    output: Path = RESULTS,
) -> None:
    """Measure the size of activations and gradients along networks of 20 to 10,001
    layers before training.

    The input is the first digits, and normalisation uses the statistics of the batch.
    Each network is measured in its own process and has a file,
    OUTPUT/depth/NETWORK-LAYERS.json. Files that exist already are kept.

    Args:
        layers: Numbers of layers, each 9n+2: three stages of n bottlenecks.
        networks: Networks. preact_scaled has weights that are scaled for the depth, plain
            has no shortcuts.
        batch: Images in the batch.
        seed: Seed of the weights.
        limit: Stop the measurement of a network after this many seconds.
        smoke: Measure only the first two networks, at the two smallest depths.
        output: Folder for the results.

    Raises:
        UserError: for options that do not fit, or a file with other settings; nothing is
            measured then. At the end, if a network could not be measured.
    """
    layers = in_order(layers, 9)
    if batch < 2:
        raise UserError(
            f"--batch must be at least 2: the network uses its statistics. Received: {batch}"
        )
    children.check_limit(limit)
    limits.check_one("seed", seed)
    if smoke:
        layers, networks = layers[:2], networks[:2]
    folder = output / "depth"
    jobs = _missing(folder, networks, layers, batch, seed)
    disk.make(folder, "--output")
    failed = []
    for file, settings in jobs.items():
        try:
            record = measured_apart(settings, limit)
        except RuntimeError as error:
            failed.append(file.stem)
            print(f"{file.stem}: {error}", file=sys.stderr, flush=True)
        else:
            disk.write_json(file, record | {"code": backends.code()}, indent=None)
            growth, ratio, *cost = _figures(record)
            figures = [f"activations x {growth}", f"gradients x {ratio} on the way back", *cost]
            print(f"{file.stem}: {', '.join(figures)}", flush=True)
    if failed:
        raise UserError(f"{len(failed)} of {len(jobs)} could not be measured: {', '.join(failed)}")


def in_order(layers: Sequence[int], step: int) -> tuple[int, ...]:
    """Return numbers of layers from small to large, each once.

    Raises:
        UserError: unless each is a multiple of `step`, plus 2.
    """
    for count in layers:
        if count < step + 2 or (count - 2) % step:
            below = max(step + 2, count - (count - 2) % step)
            raise UserError(
                f"--layers must be {step}n+2; the nearest are {below} and {below + step}. "
                f"Received: {count}"
            )
    return tuple(sorted(set(layers)))


def _missing(
    folder: Path, networks: Sequence[Name], layers: Sequence[int], batch: int, seed: int
) -> dict[Path, dict[str, Any]]:
    """Return the missing files, each with the settings of its measurement. Print which
    files are kept, and which networks are left out.
    """
    missing = {}
    for network, count in itertools.product(dict.fromkeys(networks), layers):
        file = folder / f"{network}-{count}.json"
        settings = settings_of(network, count, batch, seed)
        if count > NETWORKS[network].deepest:
            print(f"{file.stem}: left out, its gradients overflow float32")
        elif file.exists():
            _check_same(file, settings)
            print(f"{file.stem}: kept, {file}")
        else:
            missing[file] = settings
    return missing


def measured_apart(settings: Mapping[str, Any], limit: float) -> dict:
    """Measure in a separate process, which frees all of its memory at its end. If it
    fails, raise a RuntimeError that says why.
    """
    module = f"{__package__}.profiles"
    return children.result(module, json.dumps(settings), settings["backend"], limit)


def read(folder: Path = RESULTS) -> list[dict]:
    """Return all measurements in a folder of results, sorted by network and depth.

    Raises:
        UserError: for a file that holds no measurement.
    """
    order = list(NETWORKS)
    # hidden files are half-written: their process was killed
    records = [_read(file) for file in (folder / "depth").glob("[!.]*.json")]
    return sorted(
        records,
        key=lambda record: (
            order.index(record["settings"]["network"]),
            record["settings"]["layers"],
        ),
    )


def _read(file: Path) -> dict:
    with reading(f"{file} holds no measurement of a depth"):
        record = json.loads(file.read_text())
        known = record["format"] == FORMAT and record["settings"]["network"] in NETWORKS
    if not known:
        raise UserError(f"{file} has a format or a network that this version does not know.")
    return record


def _check_same(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise a UserError if a file holds the measurement of other settings."""
    stored = _read(file)["settings"]
    if different := [
        f"{key} {stored.get(key)!r}, not {value!r}"
        for key, value in settings.items()
        if stored.get(key) != value
    ]:
        raise UserError(f"{file} has {', '.join(different)}: remove it, or give another --output.")


def _figures(record: Mapping[str, Any]) -> list[str]:
    """Return growth, ratio of the gradients, time and memory as text."""
    growths = [
        "not finite" if record[key] is None else f"{record[key]:.3g}"
        for key in ("growth", "gradient_ratio")
    ]
    memory = record["cost"]["peak_resident_bytes"] / 1e9
    return [*growths, f"{record['cost']['seconds']:.1f} s", f"{memory:.1f} GB"]


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return growth and ratio of the gradients as a Markdown table: a row for each network,
    a column for each depth.
    """
    counts = sorted({record["settings"]["layers"] for record in records})
    rows = [["activations; gradients", *(f"{count:,} layers" for count in counts)]]
    for network in dict.fromkeys(record["settings"]["network"] for record in records):
        of_depth = {
            record["settings"]["layers"]: "; ".join(_figures(record)[:2])
            for record in records
            if record["settings"]["network"] == network
        }
        rows.append([NETWORKS[network].label, *(of_depth.get(count, "-") for count in counts)])
    return markdown(rows)


def about(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the networks and the batch of the measurements."""
    settings = records[0]["settings"]
    arguments = settings["arguments"]
    return (
        f"`{command('reproduce')} depth`. Networks of {arguments['block']} units with "
        f"{fractions.Fraction(arguments['width_factor'])} of the channels, on "
        f"{settings['batch']} images of {settings['data']}, seed {settings['seed']}. The table "
        "has the size of the activations at the last unit over that at the first one, and the size "
        "of the gradients at the first unit over that at the last one. Without shortcuts, the last "
        "normalisation of each unit keeps the activations at one size, and the gradients explode. "
        "Other widths, units and batches have other ratios, and may order the networks "
        "differently."
    )


#: Rows of the figure: key of a list in a profile to the label of the axis.
_PANELS = {
    "activation_rms": "Root mean square of $x_l$",
    "gradient_norm": r"Norm of $\partial E/\partial x_l$",
}


def figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the profiles along l/L: activations above, gradients below, one column per
    network, darker for deeper networks.

    The axes fit the networks with shortcuts. A mark at the edge is where a curve of a plain
    network leaves them.

    Raises:
        ImportError: without matplotlib.
    """
    from keras_preact.analysis.figures import style

    of_network: dict[Name, list[Mapping[str, Any]]] = {}
    for record in records:
        of_network.setdefault(record["settings"]["network"], []).append(record)
    counts = sorted({record["settings"]["layers"] for record in records})
    looks = {
        count: {"color": style.ordered(i, len(counts)), "linewidth": 1.6}
        for i, count in enumerate(counts)
    }
    drawn = style.new_figure(1.2 + 2.7 * max(2, len(of_network)), 6.6)
    style.heading(drawn, "Signals (above) and gradients (below) along the network, before training")
    rows = drawn.subplots(2, len(of_network), sharex=True, sharey="row", squeeze=False)
    for row, (key, title) in zip(rows, _PANELS.items(), strict=True):
        for axes, (name, shown) in zip(row, of_network.items(), strict=True):
            above = key == "activation_rms"
            style.styled(axes, NETWORKS[name].label if above else "", "" if above else "Depth l/L")
            axes.set_yscale("log", nonpositive="mask")
            axes.set_ylim(*_limits(records, key))
            axes.set_xlim(0, 1)
            axes.set_xticks([0, 1 / 3, 2 / 3, 1], ["0", "1/3", "2/3", "1"])  # where stages begin
            for record in shown:
                depths = np.array(record["profile"]["unit"]) / record["units"]
                values = np.array(record["profile"][key], "float64")
                look = looks[record["settings"]["layers"]]
                axes.plot(depths, values, **look)
                style.clipped(axes, depths, values, color=look["color"], markersize=7)
        row[0].set_ylabel(title, fontsize=style.LABEL)
    samples = {f"{count:,} layers": style.sample(look) for count, look in looks.items()}
    style.legend(drawn, samples)
    return drawn


def _limits(records: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """Return the ends of the axis: below the smallest and above the largest value of the
    networks with shortcuts.
    """
    shown = [record for record in records if record["settings"]["network"] != "plain"] or records
    values = [value for record in shown for value in record["profile"][key] if value] or [1.0]
    return min(values) / 2, max(values) * 2
