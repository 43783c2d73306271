"""The measured numbers of the unit explorer: `python docs/hooks/explorer.py`.

It measures a network per arrangement, shortcut and depth before training, and writes
docs/explorer/measured.js. Networks in this file are kept: delete the file, or a line of it,
to measure again. Those of 1,001 layers take minutes each, all others an hour on a core.
`make pages` writes the other script of the page: see explorer_choices.py.
"""

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the command finds the library

import keras
import numpy as np

import keras_preact as kp

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/explorer"
MEASURED = FOLDER / "measured.js"
#: Numbers of layers to the block of the units.
DEPTHS: Mapping[int, str] = {
    **dict.fromkeys((20, 56, 110), "basic"),
    **dict.fromkeys((164, 1001), "bottleneck"),
}
#: What all networks share: they are those of the results on digits.
NETWORK: Mapping[str, Any] = {"width_factor": 0.25, "input_shape": (8, 8, 1)}
IMAGES, SEED = 16, 0
#: Lines have about this number of points.
POINTS = 28


def cells(depths: Iterable[int] = DEPTHS) -> list[tuple[str, str, int]]:
    """Return all choices of the page, the small networks first."""
    return [
        (arrangement, shortcut, depth)
        for depth, shortcut, arrangement in itertools.product(depths, kp.SHORTCUTS, kp.ARRANGEMENTS)
    ]


def key(arrangement: str, shortcut: str, depth: int) -> str:
    """Return a choice as in the fragment of the page."""
    return f"{arrangement}/{shortcut}/{depth}"


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the first digits, normalised over all digits, and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = data.images[..., None].astype("float32")
    return ((images - images.mean()) / images.std())[:IMAGES], data.target[:IMAGES]


def network(arrangement: str, shortcut: str, depth: int) -> keras.Model:
    """Build the network of a choice with `SEED`."""
    keras.utils.set_random_seed(SEED)
    return kp.models.resnet_cifar(depth, arrangement=arrangement, shortcut=shortcut, **NETWORK)


def measure(arrangement: str, shortcut: str, depth: int) -> dict[str, Any]:
    """Measure a network before training, with the statistics of the batch.

    Returns:
        `gradient`: norm of dE/dx_l. `path`: gradient at x_l that comes through h and f
        alone, relative to that at the end of the stage. `forward`, `backward`: the composite
        gains of h from x_l to there, without `backward` if both are equal, and without both if
        they are not defined. A number instead of a list is the same at all points. Or
        `refused`: why there is no such network.
    """
    try:
        model = network(arrangement, shortcut, depth)
    except ValueError as error:
        return {"refused": str(error)}
    images, classes = digits()
    signals = kp.analysis.propagation(model, images, classes)
    direct = kp.analysis.direct_path(model, images, classes)
    at = points(depth)
    found = {"gradient": signals.gradient_norm[at], "path": direct.gain[at]}
    h = kp.SHORTCUTS[shortcut]
    # without coefficients that are computed from x, h is the same in every arrangement
    of = arrangement if h.computes_coefficients else "full_preactivation"
    forward, backward = composite(of, shortcut, depth)
    if forward is not None:
        found["forward"] = forward[at]
        if list(map(rounded, forward)) != list(map(rounded, backward)):
            found["backward"] = backward[at]
    return {name: short(values) for name, values in found.items()}


@functools.cache
def composite(arrangement: str, shortcut: str, depth: int) -> tuple:
    """Return the composite gains forward and backward from x_0 ... x_L, 1 at the end of each
    stage; None for a shortcut that mixes channels.
    """
    try:
        gain = kp.analysis.composite_gain(
            network(arrangement, shortcut, depth), digits()[0], training=True
        )
    except ValueError:
        return None, None
    both = (np.append(each, 1.0) for each in (gain.forward, gain.backward))
    return tuple(np.where(np.append(gain.ends, 0) < 0, 1.0, each) for each in both)


def starts(depth: int) -> list[int]:
    """Return the l of the first x_l of each shape: three stages, and x_0 before a bottleneck,
    which has more channels out than in.
    """
    before = [0] if DEPTHS[depth] == "bottleneck" else []
    stage = units(depth) // 3
    return [*before, len(before), stage + 1, 2 * stage + 1]


@functools.cache
def points(depth: int) -> list[int]:
    """Return the l of each x_l that lines show: the ends of the stages, and some between."""
    first = starts(depth)
    edges = {*first, *(i - 1 for i in first[1:]), units(depth)}
    return sorted({*edges, *(round(i) for i in np.linspace(0, units(depth), POINTS))})


def units(depth: int) -> int:
    """Return the number of units of a network: its blocks have two or three layers."""
    return (depth - 2) // (3 if DEPTHS[depth] == "bottleneck" else 2)


def rounded(value: float) -> float | None:
    """Return 3 digits of a number, None for one that is not finite."""
    return float(f"{value:.3g}") if np.isfinite(value) else None


def short(values: Sequence[float]) -> Any:
    """Return the numbers of a line, or the number if all are the same."""
    found = list(map(rounded, values))
    return found[0] if len(set(found)) == 1 else found


def read(file: Path = MEASURED) -> dict[str, Any]:
    """Return the measured networks by their keys."""
    if not file.exists():
        return {}
    return json.loads(re.search(r"= ({.*});", file.read_text(encoding="utf-8"), re.S)[1])


def script(name: str, about: str, content: Mapping[str, Any]) -> str:
    """Return a script that defines a constant, an entry per line."""
    entries = (
        f"{json.dumps(entry)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for entry, value in content.items()
    )
    return f"// {about}\nconst {name} = {{\n" + ",\n".join(entries) + "\n};\n"


def write(measured: Mapping[str, Any], file: Path = MEASURED) -> None:
    order = {key(*cell): i for i, cell in enumerate(cells())}
    kept = sorted(order.keys() & measured.keys(), key=lambda each: order[each])
    about = "Written by docs/hooks/explorer.py: networks before training, see `measure` there."
    text = script("MEASURED", about, {name: measured[name] for name in kept})
    file.write_text(re.sub(r"\.0\b(?=[,}\]])", "", text), encoding="utf-8")


def main() -> None:
    """Measure what the file does not have."""
    measured = read()
    for cell in cells():
        if key(*cell) not in measured:
            measured[key(*cell)] = measure(*cell)
            write(measured)
            keras.backend.clear_session()
            print(f"Measured: {key(*cell)}", flush=True)


if __name__ == "__main__":
    main()
