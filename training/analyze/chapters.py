"""The chapters of an analysis: each measures something, draws it and says what was
found.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from .subjects import Subject
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
    """A heading, and the function that yields the pictures below it from the subject
    and whether to be quick.

    It raises a ValueError if it does not apply.
    """

    title: str
    pictures: Callable[[Subject, bool], Iterator[Picture]]


def unit(subject: Subject, quick: bool) -> Iterator[Picture]:
    from keras_preact.analysis import figures

    last = {
        each.options.block.name: each for each in _units(subject)
    }  # the first activation of the first unit is in the stem
    diagrams = {block: _diagram(each) for block, each in last.items()}
    alt = " ".join(
        f"Unit ({block}): on the branch {', '.join(box.text for box in parts.branch)}; after the "
        f"addition {', '.join(box.text for box in parts.after_addition) or 'nothing'}."
        for block, parts in diagrams.items()
    )
    shortcut = {each.options.shortcut.layer_class.__name__ for each in last.values()}
    yield Picture(
        "unit",
        figures.diagrams_figure(diagrams),
        f"Block: {', '.join(diagrams)}. Shortcut: {', '.join(shortcut)}. A unit that changes the "
        "shape does so before h.",
        alt,
        {
            block: {
                "arrangement": each.get_config()["arrangement"],
                "shortcut": each.options.shortcut.layer_class.__name__,
            }
            for block, each in last.items()
        },
    )


def training(subject: Subject, quick: bool) -> Iterator[Picture]:
    from keras_preact.analysis import figures

    if not subject.history and not subject.health:
        raise LeftOut(NO_HISTORY)
    if "loss" in subject.history:
        losses = subject.history["loss"]
        curves = figures.training_curves({subject.name: subject.history}, subject.measured_on)
        found = f"In {len(losses)} epochs the training loss goes from {losses[0]:.4g} to {losses[-1]:.4g}."
        yield Picture("training_curves", curves, found, numbers={"history": subject.history})
    if subject.health:
        health = figures.training_health(subject.health)
        found = f"{len(subject.health['step'])} measurements, the last after update {subject.health['step'][-1]:.0f}."
        yield Picture("training_health", health, found, numbers={"health": subject.health})


def signals(subject: Subject, quick: bool) -> Iterator[Picture]:
    import keras_preact as kp
    from keras_preact.analysis import figures
    from keras_preact.analysis.figures import style as _style

    own = kp.analysis.propagation(
        subject.model, subject.x, subject.labels, training=subject.training
    )
    every = {subject.name: own} | ({} if quick else _variants(subject))
    first, last = own.gradient_norm[[0, -1]]
    found = f"The norm of the gradient of {subject.name} is {first:.3g} at the first unit and {last:.3g} after the last one."
    if len(every) > 1:
        found += (
            f" The other lines are {subject.name} with another arrangement, and without shortcuts."
        )
    yield Picture(
        "gradient_norms", figures.gradient_norms(every), found, numbers={"propagation": every}
    )
    kernels = np.array(
        [norms for name, norms in own.weight_gradients.items() if name.endswith("kernel")]
    )
    found = f"The norms in {subject.name} are {np.nanmin(kernels):.3g} to {np.nanmax(kernels):.3g}."
    yield Picture("weight_gradients", figures.weight_gradients({subject.name: own}), found)
    found = f"The norm in {subject.name} is {own.x_norm[0]:.3g} before the first unit and {own.x_norm[-1]:.3g} after the last."
    yield Picture("activation_norms", figures.activation_norms(every), found)
    ratio = own.ratio[np.isfinite(own.ratio)]
    found = "There are no shortcuts."
    if ratio.size:
        ends = f"{ratio.min():.3g} to {ratio.max():.3g}"
        found = (
            f"The ratio in {subject.name} goes from {ends}, its median is {np.median(ratio):.3g}."
        )
    yield Picture("residual_ratio", figures.residual_ratio(every), found)
    cut, dead = f"{100 * own.cut.max():.3g} %", f"{100 * own.dead.max():.3g} %"
    figure = figures.truncation(every)
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
    subject_of_f = subject.name
    if subject.is_foreign:
        subject_of_f = "The ReLU after the addition"
        _style.set_title(
            figure.axes[0], f"Sums that the ReLU after the addition sets to 0: at most {cut}"
        )
    found = f"{subject_of_f} sets at most {cut} of the sums to 0; at most {dead} of the channels are dead."
    yield Picture("truncation", figure, found)
    profile = figures.channel_profile(subject.model, subject.x, training=subject.training)
    there = profile.size[~np.isnan(profile.size)]
    found = f"The largest channel has a mean size of {there.max():.3g}, the median one {np.median(there):.3g}."
    yield Picture(
        "channels", figures.channel_heat_map(profile), found, numbers={"channels": profile}
    )


def identities(subject: Subject, quick: bool) -> Iterator[Picture]:
    import keras_preact as kp
    from keras_preact.analysis import figures

    if quick:
        raise LeftOut(QUICK)
    arguments = (subject.model, subject.x, subject.labels)
    check = kp.analysis.check_identities(*arguments, training=subject.training)
    there = ~np.isnan(check.forward_error)
    if not there.any():
        raise LeftOut("every unit changes the shape, and Eq. 4 and 5 are of units that keep it")
    forward, backward = check.forward_error[there].max(), check.gradient_error[there].max()
    found = f"Eq. 4 is off by {forward:.2g} at most, Eq. 5 by {backward:.2g}."
    yield Picture(
        "gradient_split", figures.gradient_split(check), found, numbers={"equations": check}
    )
    path = kp.analysis.direct_path(*arguments, training=subject.training)
    gain, survival = 100 * np.nanmin(path.gain), 100 * np.nanmin(path.survival)
    found = f"At least {gain:.3g} % of the norm and {survival:.3g} % of the entries return to the beginning of a stage."
    yield Picture(
        "direct_path",
        figures.direct_paths({subject.name: path}),
        found,
        numbers={"direct_path": path},
    )


def ensemble(subject: Subject, quick: bool) -> Iterator[Picture]:
    import keras_preact as kp
    from keras_preact.analysis import figures

    if not any(each.options.shortcut.layer_class.reads_input for each in _units(subject)):
        raise LeftOut("a network without shortcuts has one path")
    units = len(_units(subject))
    shares = kp.analysis.path_lengths(units)
    found = f"{units} units make 2^{units} paths."
    yield Picture(
        "path_lengths", figures.path_length_shares(shares), found, numbers={"path_lengths": shares}
    )
    if quick or not subject.trained or subject.more is None or units < 2:
        return
    counts = sorted(set(np.linspace(1, units - 1, SIZES).round().astype(int).tolist()))
    lesions = kp.analysis.lesions(
        subject.model, *subject.more, list(kp.analysis.random_lesions(units, counts, SETS))
    )
    intact, without = 100 * lesions.intact_error, 100 * lesions.error[:SETS].mean()
    found = f"With all units {intact:.3g} % of {len(subject.more[1])} test images are wrong, without one unit {without:.3g} %."
    yield Picture("lesions", figures.lesion_errors(lesions), found, numbers={"lesions": lesions})


def jacobian(subject: Subject, quick: bool) -> Iterator[Picture]:
    from keras_preact.analysis import figures, jacobians

    units = len(_units(subject))
    if quick:
        raise LeftOut(QUICK)
    if units < 2:
        raise LeftOut(
            "the network has a single unit, and the chapter is about those after the first"
        )
    settings = {"training": subject.training}
    start = _numpy(jacobians.between(subject.model, None, 1, **settings)(subject.x[:1]))
    if start.size > LARGEST_INPUT:
        raise LeftOut(
            f"x_1 has {start.size:,} entries; the Jacobian of more than {LARGEST_INPUT:,} takes "
            "too long"
        )
    body = jacobians.between(subject.model, 1, units, **settings)
    smaller = min(start.size, _numpy(body(start)).size)
    found = jacobians.spectrum(
        body, start, k=None if smaller <= jacobians.EXACT_UP_TO else LARGEST_VALUES
    )
    which = (
        f"All {smaller:,}"
        if found.is_complete
        else f"The {len(found.values)} largest of {smaller:,}"
    )
    whose = "its own statistics" if subject.training else "the moving statistics"
    label = f"x_1 to x_{units}"
    yield Picture(
        "singular_values",
        figures.singular_values({label: found}),
        f"{which} singular values of the map from {label}, at one image with {whose}; the "
        f"largest is {found.values[0]:.3g}.",
        numbers={"spectrum": found},
    )


def mean_field(subject: Subject, quick: bool) -> Iterator[Picture]:
    import keras

    from keras_preact.analysis import figures
    from keras_preact.analysis import mean_field as theory

    kind = _units(subject)[-1]
    if quick:
        raise LeftOut(QUICK)
    name = keras.activations.serialize(kind.options.activation)
    if name not in theory.ACTIVATIONS:
        raise LeftOut(f"the theory has no row for the activation {name}")
    variance = _weight_variance(subject)
    phases = theory.phase_diagram(
        name, np.linspace(0.5, max(4.0, 1.2 * variance), 13), np.linspace(0.01, 0.5, 7)
    )
    point = {f"{subject.name}, if it were plain": (variance, 0.0)}
    found = f"The kernels of the units have a variance of {variance:.3g} / fan-in (median); the activation is {name}."
    numbers = {"weight_variance": variance, "phases": phases}
    yield Picture("phases", figures.phases(phases, point), found, numbers=numbers)
    weights = len(kind.options.block.kinds)
    fields = {
        "plain": theory.MeanField(name, variance),
        "identity shortcut": theory.MeanField(name, variance, shortcut="identity", weights=weights),
    }
    found = f"Weights have this variance; a unit with a shortcut has {weights}."
    yield Picture("correlation_maps", figures.correlation_maps(fields), found)


#: Name in analysis.json to chapter, in the order of the page.
CHAPTERS: Mapping[str, Chapter] = MappingProxyType(
    {
        "unit": Chapter("The unit", unit),
        "training": Chapter("Training", training),
        "signals": Chapter("Signals and gradients by depth", signals),
        "identities": Chapter("What the shortcuts carry", identities),
        "ensemble": Chapter("An ensemble of paths", ensemble),
        "jacobian": Chapter("Jacobian", jacobian),
        "mean_field": Chapter("Mean-field theory", mean_field),
    }
)


def _units(subject: Subject) -> list:
    if subject.is_foreign:
        raise LeftOut(FOREIGN)
    return subject.model.units


def _diagram(unit):
    import keras

    from keras_preact.analysis import figures

    names = {
        "normalization": unit.options.normalization.serialize(),
        "activation": keras.activations.serialize(unit.options.activation),
    }
    words = {key: name if isinstance(name, str) else "custom" for key, name in names.items()}
    return figures.diagram(
        unit.options.arrangement, unit.options.shortcut.make(), unit.options.block, **words
    )


def _variants(subject: Subject) -> dict[str, Any]:
    """Measure, beside a registered model with new weights, the same with the other
    arrangements and without shortcuts.
    """
    import keras_preact as kp

    if (
        subject.entry is None
        or kp.model_entry(subject.entry).arguments.get("arrangement") not in kp.ARRANGEMENTS
    ):
        return {}
    own = kp.model_entry(subject.entry).arguments["arrangement"]
    changes: dict[str, dict[str, Any]] = {
        name: {"arrangement": name} for name in kp.ARRANGEMENTS if name != own
    }
    changes["no shortcuts"] = {"shortcut": "none"}
    networks = {
        label: kp.create_model(subject.entry, **change) for label, change in changes.items()
    }
    return {
        label: kp.analysis.propagation(network, subject.x, subject.labels)
        for label, network in networks.items()
    }


def _weight_variance(subject: Subject) -> float:
    """Return the median over the kernels in the units' branches of their mean square
    times their fan-in.
    """
    kernels = [
        _numpy(weight)
        for unit in _units(subject)
        for weight in unit.trainable_weights
        if weight.path.endswith("kernel") and "branch/" in weight.path
    ]
    return float(np.median([np.mean(kernel**2) * np.prod(kernel.shape[:-1]) for kernel in kernels]))


def _numpy(tensor) -> np.ndarray:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(tensor))
