"""The chapters of an analysis: each measures something, draws it and says what was
found.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

import keras_preact as kp
from keras_preact.analysis import figures, jacobians
from keras_preact.analysis import mean_field as theory
from keras_preact.analysis.figures import style

from .specimen import Specimen
from .texts import TEXTS

#: The most entries of x_1 whose Jacobian is measured; how many singular values if all are too many.
LARGEST_INPUT, LARGEST_VALUES = 50_000, 8
#: How many sets of units of each size are removed, and how many sizes.
SETS, SIZES = 3, 6
#: Why chapters are left out.
QUICK = "left out by --quick"
FOREIGN = "only for networks built with keras_preact"
NO_HISTORY = "only for runs with a history of training"


class LeftOut(ValueError):
    """A chapter does not apply; the message says why."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page.

    Args:
        name: Name of its files, and of its row in `TEXTS`.
        figure: A matplotlib figure.
        found: What was measured, a sentence.
        alt: What it shows, if `TEXTS` does not say it.
        numbers: For analysis.json.
    """

    name: str
    figure: Any
    found: str
    alt: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def how(self) -> str:
        return TEXTS[self.name].how

    @property
    def shown(self) -> str:
        return self.alt or TEXTS[self.name].alt


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A heading, and the function that yields the pictures below it from the specimen
    and whether to be quick.

    It raises a ValueError if it does not apply.
    """

    title: str
    pictures: Callable[[Specimen, bool], Iterator[Picture]]


def unit(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    # the last unit of each block: the first activation of the first unit is in the stem
    last = {each.block.name: each for each in _units(specimen)}
    diagrams = {block: _diagram(each) for block, each in last.items()}
    alt = " ".join(
        f"Unit ({block}): on the branch {', '.join(box.text for box in parts.branch)}; after the "
        f"addition {', '.join(box.text for box in parts.after_addition) or 'nothing'}."
        for block, parts in diagrams.items()
    )
    shortcuts = {block: type(each.shortcut).__name__ for block, each in last.items()}
    found = (
        f"Block: {', '.join(diagrams)}. Shortcut: {', '.join(set(shortcuts.values()))}. A unit "
        "that changes the shape does so before h."
    )
    numbers = {
        block: {"arrangement": each.get_config()["arrangement"], "shortcut": shortcuts[block]}
        for block, each in last.items()
    }
    yield Picture("unit", figures.diagrams_figure(diagrams), found, alt, numbers)


def training(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if not specimen.history and not specimen.health:
        raise LeftOut(NO_HISTORY)
    if "loss" in specimen.history:
        losses = specimen.history["loss"]
        curves = figures.training_curves({specimen.name: specimen.history}, specimen.measured_on)
        found = (
            f"In {len(losses)} epochs the training loss goes from {losses[0]:.4g} to "
            f"{losses[-1]:.4g}."
        )
        yield Picture("training_curves", curves, found, numbers={"history": specimen.history})
    if specimen.health:
        health = figures.training_health(specimen.health)
        steps = specimen.health["step"]
        found = f"{len(steps)} measurements, the last after update {steps[-1]:.0f}."
        yield Picture("training_health", health, found, numbers={"health": specimen.health})


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
    yield Picture(
        "gradient_norms", figures.gradient_norms(every), found, numbers={"propagation": every}
    )
    kernels = np.array(
        [norms for path, norms in own.weight_gradients.items() if path.endswith("kernel")]
    )
    found = f"The norms in {name} are {np.nanmin(kernels):.3g} to {np.nanmax(kernels):.3g}."
    yield Picture("weight_gradients", figures.weight_gradients({name: own}), found)
    found = (
        f"The norm in {name} is {own.x_norm[0]:.3g} before the first unit and "
        f"{own.x_norm[-1]:.3g} after the last."
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
    yield _truncation(specimen, own, every)
    profile = figures.channel_profile(specimen.model, specimen.x, training=specimen.training)
    there = profile.size[~np.isnan(profile.size)]
    found = (
        f"The largest channel has a mean size of {there.max():.3g}, the median one "
        f"{np.median(there):.3g}."
    )
    yield Picture(
        "channels", figures.channel_heat_map(profile), found, numbers={"channels": profile}
    )


def _truncation(specimen: Specimen, own: Any, every: Mapping[str, Any]) -> Picture:
    cut, dead = f"{100 * own.cut.max():.3g} %", f"{100 * own.dead.max():.3g} %"
    figure = figures.truncation(every)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
    subject = specimen.name
    if specimen.is_foreign:
        subject = "The ReLU after the addition"
        style.set_title(
            figure.axes[0], f"Sums that the ReLU after the addition sets to 0: at most {cut}"
        )
    found = (
        f"{subject} sets at most {cut} of the sums to 0; at most {dead} of the channels are dead."
    )
    return Picture("truncation", figure, found)


def identities(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if quick:
        raise LeftOut(QUICK)
    arguments = (specimen.model, specimen.x, specimen.labels)
    check = kp.analysis.check_identities(*arguments, training=specimen.training)
    there = ~np.isnan(check.forward_error)
    if not there.any():
        raise LeftOut("every unit changes the shape, and Eq. 4 and 5 are of units that keep it")
    forward, backward = check.forward_error[there].max(), check.gradient_error[there].max()
    found = f"Eq. 4 is off by {forward:.2g} at most, Eq. 5 by {backward:.2g}."
    yield Picture(
        "gradient_split", figures.gradient_split(check), found, numbers={"equations": check}
    )
    path = kp.analysis.direct_path(*arguments, training=specimen.training)
    gain, survival = 100 * np.nanmin(path.gain), 100 * np.nanmin(path.survival)
    found = (
        f"At least {gain:.3g} % of the norm and {survival:.3g} % of the entries return to the "
        "beginning of a stage."
    )
    picture = figures.direct_paths({specimen.name: path})
    yield Picture("direct_path", picture, found, numbers={"direct_path": path})


def ensemble(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if not any(each.shortcut.reads_input for each in _units(specimen)):
        raise LeftOut("a network without shortcuts has one path")
    units = len(_units(specimen))
    shares = kp.analysis.path_lengths(units)
    found = f"{units} units make 2^{units} paths."
    yield Picture(
        "path_lengths", figures.path_length_shares(shares), found, numbers={"path_lengths": shares}
    )
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
    yield Picture("lesions", figures.lesion_errors(lesions), found, numbers={"lesions": lesions})


def jacobian(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    units = len(_units(specimen))
    if quick:
        raise LeftOut(QUICK)
    if units < 2:
        raise LeftOut(
            "the network has a single unit, and the chapter is about those after the first"
        )
    settings = {"training": specimen.training}
    start = _numpy(jacobians.between(specimen.model, None, 1, **settings)(specimen.x[:1]))
    if start.size > LARGEST_INPUT:
        raise LeftOut(
            f"x_1 has {start.size:,} entries; the Jacobian of more than {LARGEST_INPUT:,} takes "
            "too long"
        )
    body = jacobians.between(specimen.model, 1, units, **settings)
    smaller = min(start.size, _numpy(body(start)).size)
    most = None if smaller <= jacobians.EXACT_UP_TO else LARGEST_VALUES
    found = jacobians.spectrum(body, start, k=most)
    complete = f"All {smaller:,}", f"The {len(found.values)} largest of {smaller:,}"
    whose = "its own statistics" if specimen.training else "the moving statistics"
    label = f"x_1 to x_{units}"
    yield Picture(
        "singular_values",
        figures.singular_values({label: found}),
        f"{complete[not found.is_complete]} singular values of the map from {label}, at one "
        f"image with {whose}; the largest is {found.values[0]:.3g}.",
        numbers={"spectrum": found},
    )


def mean_field(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    kind = _units(specimen)[-1]
    if quick:
        raise LeftOut(QUICK)
    name = keras.activations.serialize(kind.activation)
    if name not in theory.ACTIVATIONS:
        raise LeftOut(f"the theory has no row for the activation {name}")
    variance = _weight_variance(specimen)
    xi = theory.MeanField(name, variance).xi
    found = (
        f"The kernels of the units have a variance of {variance:.3g} / fan-in (median); the "
        f"activation is {name}. Without shortcuts and normalisation, the squared norm of a "
        f"gradient would change by a factor of e over {xi:.3g} layers."
    )
    picture = figures.depth_scales(
        name, np.linspace(0.5, max(4.0, 1.2 * variance), 71), networks={specimen.name: variance}
    )
    numbers = {"weight_variance": variance, "depth_scale": xi}
    yield Picture("depth_scales", picture, found, numbers=numbers)


#: Name in analysis.json to chapter, in the order of the page.
CHAPTERS: Mapping[str, Chapter] = {
    "unit": Chapter("The unit", unit),
    "training": Chapter("Training", training),
    "signals": Chapter("Signals and gradients by depth", signals),
    "identities": Chapter("What the shortcuts carry", identities),
    "ensemble": Chapter("An ensemble of paths", ensemble),
    "jacobian": Chapter("Jacobian", jacobian),
    "mean_field": Chapter("Mean-field theory", mean_field),
}


def _units(specimen: Specimen) -> list:
    if specimen.is_foreign:
        raise LeftOut(FOREIGN)
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


def _weight_variance(specimen: Specimen) -> float:
    """Return the median over the kernels in the units' branches of their mean square
    times their fan-in.
    """
    kernels = [
        _numpy(weight)
        for unit in _units(specimen)
        for weight in unit.trainable_weights
        if weight.path.endswith("kernel") and "branch/" in weight.path
    ]
    return float(np.median([np.mean(kernel**2) * np.prod(kernel.shape[:-1]) for kernel in kernels]))


def _numpy(tensor) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(tensor))
