"""The chapters of an analysis: each measures something, draws it and says what was
found.

A chapter yields its pictures from the specimen and whether to be quick. It raises a
ValueError with the reason if it does not apply.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

import keras_preact as kp
from keras_preact.analysis import figures, jacobians

from .specimen import Specimen

#: The most entries of x_1 whose Jacobian is measured; how many singular values if all are too many.
LARGEST_INPUT, LARGEST_VALUES = 50_000, 8
#: How many sets of units of each size are removed, and how many sizes.
SETS, SIZES = 3, 6
#: How many images are shown with their maps.
SHOWN = 6
#: Why chapters are left out.
QUICK = "left out by --quick"
FOREIGN = "only for networks built with keras_preact"
NO_HISTORY = "only for runs with a history of training"


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Args:
        name: Name of its files, and of its texts in pictures.toml.
        figure: A matplotlib figure.
        found: What was measured, a sentence.
        numbers: For analysis.json.
        alt: What it shows, if pictures.toml does not say it.
    """

    name: str
    figure: Any
    found: str
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alt: str = ""


def unit(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    # the last unit of each block: the first activation of the first unit is in the stem
    last = {each.block.name: each for each in _units(specimen)}
    diagrams = {block: _diagram(each) for block, each in last.items()}
    shortcuts = {block: type(each.shortcut).__name__ for block, each in last.items()}
    found = (
        f"Block: {', '.join(diagrams)}. Shortcut: {', '.join(set(shortcuts.values()))}. A unit "
        "that changes the shape does so before h."
    )
    numbers = {
        block: {"arrangement": each.get_config()["arrangement"], "shortcut": shortcuts[block]}
        for block, each in last.items()
    }
    alt = " ".join(
        f"Unit ({block}): on the branch {', '.join(box.text for box in parts.branch)}; after the "
        f"addition {', '.join(box.text for box in parts.after_addition) or 'nothing'}."
        for block, parts in diagrams.items()
    )
    yield Picture("unit", figures.diagrams_figure(diagrams), found, numbers, alt)


def training(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    history, health = specimen.history, specimen.health
    if not history and not health:
        raise ValueError(NO_HISTORY)
    if "loss" in history:
        losses = history["loss"]
        found = (
            f"In {len(losses)} epochs the training loss goes from {losses[0]:.4g} to "
            f"{losses[-1]:.4g}."
        )
        figure = figures.training_curves({specimen.name: history}, specimen.measured_on)
        yield Picture("training_curves", figure, found, {"history": history})
    if health:
        steps = health["step"]
        found = f"{len(steps)} measurements, the last after update {steps[-1]:.0f}."
        yield Picture("training_health", figures.training_health(health), found, {"health": health})


def signals(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    name = specimen.name
    own = kp.analysis.propagation(
        specimen.model, specimen.x, specimen.labels, training=specimen.training
    )
    every = {name: own} | ({} if quick else _variants(specimen))
    first, last = own.gradient_norm[[0, -1]]
    found = (
        f"The norm of the gradient of {name} is {first:.3g} at the first unit and {last:.3g} "
        "after the last one."
    )
    if len(every) > 1:
        found += f" The other lines are {name} with another arrangement, and without shortcuts."
    yield Picture("gradient_norms", figures.gradient_norms(every), found, {"propagation": every})

    norms = [each for path, each in own.weight_gradients.items() if path.endswith("kernel")]
    found = f"The norms in {name} are {np.nanmin(norms):.3g} to {np.nanmax(norms):.3g}."
    yield Picture("weight_gradients", figures.weight_gradients({name: own}), found)

    before, after = own.x_norm[[0, -1]]
    found = (
        f"The norm in {name} is {before:.3g} before the first unit and {after:.3g} after the last."
    )
    yield Picture("activation_norms", figures.activation_norms(every), found)

    ratio = own.ratio[np.isfinite(own.ratio)]
    found = "There are no shortcuts."
    if ratio.size:
        found = (
            f"The ratio in {name} goes from {ratio.min():.3g} to {ratio.max():.3g}, its median "
            f"is {np.median(ratio):.3g}."
        )
    yield Picture("residual_ratio", figures.residual_ratio(every), found)

    found = (
        f"An activation after the addition sets at most {100 * own.cut.max():.3g} % of the sums "
        f"to 0; at most {100 * own.dead.max():.3g} % of the channels are dead."
    )
    yield Picture("truncation", figures.truncation(every), found)

    profile = figures.channel_profile(specimen.model, specimen.x, training=specimen.training)
    found = (
        f"The largest channel has a mean size of {np.nanmax(profile.size):.3g}, the median one "
        f"{np.nanmedian(profile.size):.3g}."
    )
    yield Picture("channels", figures.channel_heat_map(profile), found, {"channels": profile})


def identities(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if quick:
        raise ValueError(QUICK)
    batch = (specimen.model, specimen.x, specimen.labels)
    check = kp.analysis.check_identities(*batch, training=specimen.training)
    if np.isnan(check.forward_error).all():
        raise ValueError("every unit changes the shape, and Eq. 4 and 5 are of units that keep it")
    forward, backward = np.nanmax(check.forward_error), np.nanmax(check.gradient_error)
    found = f"Eq. 4 is off by {forward:.2g} at most, Eq. 5 by {backward:.2g}."
    yield Picture("gradient_split", figures.gradient_split(check), found, {"equations": check})

    path = kp.analysis.direct_path(*batch, training=specimen.training)
    found = (
        f"At least {100 * np.nanmin(path.gain):.3g} % of the norm and "
        f"{100 * np.nanmin(path.survival):.3g} % of the entries return to the beginning of a stage."
    )
    figure = figures.direct_paths({specimen.name: path})
    yield Picture("direct_path", figure, found, {"direct_path": path})


def ensemble(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    units = len(_units(specimen))
    if not any(each.shortcut.reads_input for each in _units(specimen)):
        raise ValueError("a network without shortcuts has one path")
    shares = kp.analysis.path_lengths(units)
    found = f"{units} units make 2^{units} paths."
    figure = figures.path_length_shares(shares)
    yield Picture("path_lengths", figure, found, {"path_lengths": shares})
    if quick or not specimen.trained or specimen.more is None or units < 2:
        return
    counts = sorted(set(np.linspace(1, units - 1, SIZES).round().astype(int).tolist()))
    lesions = kp.analysis.lesions(
        specimen.model, *specimen.more, list(kp.analysis.random_lesions(units, counts, SETS))
    )
    intact, without = 100 * lesions.intact_error, 100 * lesions.error[:SETS].mean()
    found = (
        f"With all units {intact:.3g} % of {len(specimen.more[1])} test images are wrong, "
        f"without one unit {without:.3g} %."
    )
    yield Picture("lesions", figures.lesion_errors(lesions), found, {"lesions": lesions})


def looks(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if not specimen.trained or specimen.more is None:
        raise ValueError("only for trained networks and labelled images")
    images, labels = (each[:SHOWN] for each in specimen.more)
    maps = kp.analysis.grad_cam(specimen.model, images, labels)
    empty = int((maps.max(axis=(1, 2)) == 0).sum())
    found = f"{len(images)} test images and what speaks for their own class"
    found += f"; for {empty} of them nothing does." if empty else "."
    titles = [f"class {label}" for label in labels]
    yield Picture("class_maps", figures.class_maps(images, maps, titles), found)


def jacobian(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    units = len(_units(specimen))
    if quick:
        raise ValueError(QUICK)
    if units < 2:
        raise ValueError(
            "the network has a single unit, and the chapter is about those after the first"
        )
    stem = jacobians.between(specimen.model, None, 1, training=specimen.training)
    body = jacobians.between(specimen.model, 1, units, training=specimen.training)
    start = _numpy(stem(specimen.x[:1]))
    if start.size > LARGEST_INPUT:
        raise ValueError(
            f"x_1 has {start.size:,} entries; the Jacobian of more than {LARGEST_INPUT:,} takes "
            "too long"
        )
    size = min(start.size, _numpy(body(start)).size)
    spectrum = jacobians.spectrum(
        body, start, k=None if size <= jacobians.EXACT_UP_TO else LARGEST_VALUES
    )
    values = f"All {size:,}"
    if not spectrum.is_complete:
        values = f"The {len(spectrum.values)} largest of {size:,}"
    whose = "its own statistics" if specimen.training else "the moving statistics"
    label = f"x_1 to x_{units}"
    found = (
        f"{values} singular values of the map from {label}, at one image with {whose}; the "
        f"largest is {spectrum.values[0]:.3g}."
    )
    figure = figures.singular_values({label: spectrum})
    yield Picture("singular_values", figure, found, {"spectrum": spectrum})


#: Heading to chapter, in the order of the page. The function's name is the chapter's in
#: analysis.json.
CHAPTERS: Mapping[str, Callable[[Specimen, bool], Iterator[Picture]]] = {
    "The unit": unit,
    "Training": training,
    "Signals and gradients by depth": signals,
    "What the shortcuts carry": identities,
    "An ensemble of paths": ensemble,
    "Where the network looks": looks,
    "Jacobian": jacobian,
}


def _units(specimen: Specimen) -> list:
    if specimen.is_foreign:
        raise ValueError(FOREIGN)
    return specimen.model.units


def _diagram(unit):
    names = {
        "normalization": unit.get_config()["normalization"],
        "activation": keras.activations.serialize(unit.activation),
    }
    words = {key: name if isinstance(name, str) else "custom" for key, name in names.items()}
    return figures.diagram(unit.arrangement, unit.shortcut, unit.block, **words)


def _variants(specimen: Specimen) -> dict[str, Any]:
    """Measure a registered model, with new weights, with the other arrangements and without
    shortcuts.
    """
    entry = specimen.entry
    own = entry and kp.model_entry(entry).arguments.get("arrangement")
    if own not in kp.ARRANGEMENTS:
        return {}
    changes: dict[str, dict[str, Any]] = {
        name: {"arrangement": name} for name in kp.ARRANGEMENTS if name != own
    }
    changes["no shortcuts"] = {"shortcut": "none"}
    return {
        label: kp.analysis.propagation(
            kp.create_model(str(entry), **change), specimen.x, specimen.labels
        )
        for label, change in changes.items()
    }


def _numpy(tensor) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(tensor))
