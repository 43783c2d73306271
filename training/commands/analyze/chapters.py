"""The chapters of an analysis: each measures something, draws it and says what was
found.

A chapter takes the specimen and whether to be quick, and yields its pictures. It raises
a ValueError with the reason if it does not apply.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

import keras_preact as kp
from keras_preact.analysis import figures, jacobians

from .page import TEXTS
from .specimen import Specimen

#: Most entries of x_1 for the Jacobian; number of singular values if not all are computed.
LARGEST_INPUT, LARGEST_VALUES = 50_000, 8
#: Number of sets of units of each size that are removed, and number of sizes.
SETS, SIZES = 3, 6
#: Number of images that are shown with their maps.
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
        found: A sentence that says what was measured.
        numbers: Numbers for analysis.json.
        alt: What it shows. If empty, the text in pictures.toml is used.
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
    shortcuts = {block: type(each.h).__name__ for block, each in last.items()}
    numbers = {
        block: {"arrangement": each.get_config()["arrangement"], "shortcut": shortcuts[block]}
        for block, each in last.items()
    }
    alt = " ".join(
        f"Unit ({block}): on the branch {', '.join(box.text for box in parts.branch)}; after the "
        f"addition {', '.join(box.text for box in parts.after_addition) or 'nothing'}."
        for block, parts in diagrams.items()
    )
    names = {"blocks": ", ".join(diagrams), "shortcuts": ", ".join(set(shortcuts.values()))}
    yield _picture("unit", figures.diagrams_figure(diagrams), numbers, alt, **names)


def training(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    history, health = specimen.history, specimen.health
    if not history and not health:
        raise ValueError(NO_HISTORY)
    if "loss" in history:
        losses = history["loss"]
        figure = figures.training_curves({specimen.name: history}, specimen.measured_on)
        ends = {"epochs": len(losses), "first": losses[0], "last": losses[-1]}
        yield _picture("training_curves", figure, {"history": history}, **ends)
    if health:
        steps = health["step"]
        figure = figures.training_health(health)
        ends = {"count": len(steps), "last": steps[-1]}
        yield _picture("training_health", figure, {"health": health}, **ends)


def signals(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    name = specimen.name
    propagation = kp.analysis.propagation(
        specimen.model, specimen.x, specimen.labels, training=specimen.training
    )
    networks = {name: propagation} | ({} if quick else _variants(specimen))
    others = f"The other lines are {name} with another arrangement, and without shortcuts."
    yield _picture(
        "gradient_norms",
        figures.gradient_norms(networks),
        {"propagation": networks},
        name=name,
        first=propagation.gradient_norm[0],
        last=propagation.gradient_norm[-1],
        others=others if len(networks) > 1 else "",
    )
    gradients = propagation.weight_gradients
    norms = [norm for path, norm in gradients.items() if path.endswith("kernel")]
    ends = {"least": np.nanmin(norms), "most": np.nanmax(norms)}
    figure = figures.weight_gradients({name: propagation})
    yield _picture("weight_gradients", figure, name=name, **ends)
    ends = {"first": propagation.x_norm[0], "last": propagation.x_norm[-1]}
    yield _picture("activation_norms", figures.activation_norms(networks), name=name, **ends)
    ratio = propagation.ratio[np.isfinite(propagation.ratio)]
    if ratio.size:  # there are shortcuts
        ends = {"least": ratio.min(), "most": ratio.max(), "median": np.median(ratio)}
        yield _picture("residual_ratio", figures.residual_ratio(networks), name=name, **ends)
        cosines = propagation.residual_cosine
        ends = {"least": np.nanmin(cosines), "most": np.nanmax(cosines)}
        ends["median"] = np.nanmedian(propagation.output_cosine)
        yield _picture("alignment", figures.alignment(networks), name=name, **ends)
    shares = {"cut": 100 * propagation.cut.max(), "dead": 100 * propagation.dead.max()}
    yield _picture("truncation", figures.truncation(networks), **shares)
    profile = kp.analysis.channel_profile(specimen.model, specimen.x, training=specimen.training)
    sizes = {"most": np.nanmax(profile.size), "median": np.nanmedian(profile.size)}
    yield _picture("channels", figures.channel_heat_map(profile), {"channels": profile}, **sizes)


def identities(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if quick:
        raise ValueError(QUICK)
    batch = (specimen.model, specimen.x, specimen.labels)
    check = kp.analysis.check_identities(*batch, training=specimen.training)
    if np.isnan(check.forward_error).all():
        raise ValueError("every unit changes the shape; Eq. 4 and 5 need units that keep it")
    errors = {
        "forward": np.nanmax(check.forward_error),
        "backward": np.nanmax(check.gradient_error),
    }
    yield _picture("gradient_split", figures.gradient_split(check), {"equations": check}, **errors)
    path = kp.analysis.direct_path(*batch, training=specimen.training)
    figure = figures.direct_paths({specimen.name: path})
    kept = {"gain": 100 * np.nanmin(path.gain), "survival": 100 * np.nanmin(path.survival)}
    yield _picture("direct_path", figure, {"direct_path": path}, **kept)
    try:
        gain = kp.analysis.composite_gain(*batch[:2], training=specimen.training)
    except ValueError:  # a shortcut that mixes channels
        return
    both = np.array([gain.forward, gain.backward])
    if ((both != 1) & (both > 0)).any():  # no identities, and no plain network
        ends = {"signals": np.nanmax(gain.forward), "gradients": np.nanmax(gain.backward)}
        figure = figures.composite_gains({specimen.name: gain})
        yield _picture("composite_gain", figure, {"composite_gain": gain}, **ends)


def ensemble(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    units = len(_units(specimen))
    if not any(each.h.reads_input for each in _units(specimen)):
        raise ValueError("a network without shortcuts has one path")
    shares = kp.analysis.path_lengths(units)
    figure = figures.path_length_shares(shares)
    yield _picture("path_lengths", figure, {"path_lengths": shares}, units=units)
    if quick or not specimen.trained or specimen.more is None or units < 2:
        return
    counts = sorted(set(np.linspace(1, units - 1, SIZES).round().astype(int).tolist()))
    lesions = kp.analysis.lesions(
        specimen.model, *specimen.more, list(kp.analysis.random_lesions(units, counts, SETS))
    )
    wrong = {"intact": 100 * lesions.intact_error, "without": 100 * lesions.error[:SETS].mean()}
    count = len(specimen.more[1])
    figure = figures.lesion_errors(lesions)
    yield _picture("lesions", figure, {"lesions": lesions}, count=count, **wrong)


def looks(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if not specimen.trained or specimen.more is None:
        raise ValueError("only for trained networks and labelled images")
    images, labels = (each[:SHOWN] for each in specimen.more)
    maps = kp.analysis.grad_cam(specimen.model, images, labels)
    empty = int((maps.max(axis=(1, 2)) == 0).sum())
    figure = figures.class_maps(images, maps, [f"class {label}" for label in labels])
    yield _picture("class_maps", figure, count=len(images), empty=empty)


def logits(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    if not specimen.trained or specimen.more is None:
        raise ValueError("only for trained networks and labelled images")
    images, labels = (each[: len(specimen.x)] for each in specimen.more)
    parts = kp.analysis.contributions(specimen.model, images, labels)
    mean = {"logit": parts.logits.mean(), "units": parts.residual.sum(axis=0).mean()}
    figure = figures.logit_contributions(parts)
    yield _picture("contributions", figure, {"contributions": parts}, count=len(images), **mean)


def jacobian(specimen: Specimen, quick: bool) -> Iterator[Picture]:
    units = len(_units(specimen))
    if quick:
        raise ValueError(QUICK)
    if units < 2:
        raise ValueError(
            "the network has a single unit; this chapter is about the units after the first"
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
    statistics = "its own statistics" if specimen.training else "the moving statistics"
    figure = figures.singular_values({f"x_1 to x_{units}": spectrum})
    yield _picture(
        "singular_values",
        figure,
        {"spectrum": spectrum},
        values=values,
        units=units,
        statistics=statistics,
        largest=spectrum.values[0],
    )


#: Heading of a chapter to its function, in the order of the page. The function's name is the
#: chapter's key in analysis.json.
CHAPTERS: Mapping[str, Callable[[Specimen, bool], Iterator[Picture]]] = {
    "The unit": unit,
    "Training": training,
    "Signals and gradients by depth": signals,
    "What the shortcuts carry": identities,
    "An ensemble of paths": ensemble,
    "Where the network looks": looks,
    "What the units add to a logit": logits,
    "Jacobian": jacobian,
}


def _picture(
    key: str,
    figure: Any,
    numbers: Mapping[str, Any] = MappingProxyType({}),
    alt: str = "",
    /,
    **measured: Any,
) -> Picture:
    """Return a picture; fill its sentence in pictures.toml with what was measured."""
    return Picture(key, figure, TEXTS[key]["found"].format(**measured).strip(), numbers, alt)


def _units(specimen: Specimen) -> list:
    if specimen.is_foreign:
        raise ValueError(FOREIGN)
    return specimen.model.copy_units()


def _diagram(unit):
    names = {
        "normalization": unit.get_config()["normalization"],
        "activation": keras.activations.serialize(unit.activation),
    }
    words = {key: name if isinstance(name, str) else "custom" for key, name in names.items()}
    return figures.diagram(unit.arrangement, unit.h, unit.block, **words)


def _variants(specimen: Specimen) -> dict[str, Any]:
    """Measure a registered model with each of the other arrangements, and without
    shortcuts. All weights are new. Other networks have no variants.
    """
    entry = specimen.entry
    arrangement = entry and kp.model_entry(entry).arguments.get("arrangement")
    if arrangement not in kp.ARRANGEMENTS:
        return {}
    changes: dict[str, dict[str, Any]] = {
        name: {"arrangement": name} for name in kp.ARRANGEMENTS if name != arrangement
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
