"""The named models. Each has a builder with arguments, its preprocessing, and its rows
in the published tables.
"""

import dataclasses
import difflib
import fnmatch
import hashlib
import json
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keras_preact import stacks
from keras_preact._read_only import ReadOnly
from keras_preact.layers import spatial
from keras_preact.models import named_weights, other_names
from keras_preact.models.base import UnitNetwork
from keras_preact.models.cifar import fast_resnet, resnet_cifar, wide_resnet
from keras_preact.models.copies import changed_copy
from keras_preact.models.dense import dense_resnet
from keras_preact.models.imagenet import DEPTHS as IMAGENET_DEPTHS
from keras_preact.models.imagenet import resnet_imagenet
from keras_preact.models.tokens import transformer
from keras_preact.models.vanilla import vanilla_cnn
from keras_preact.preprocessing import PREPROCESSING, Preprocessing
from keras_preact.published import PARAMETER_COUNTS, RESULTS, ParameterCount, Result

WEIGHT_SUFFIXES = (".weights.h5", ".keras")
#: Options that may change when a network loads weights of this package: those of its input and
#: output, those of training alone, and those of how it is computed.
OPTIONAL = (
    *("classifier_activation", "data_format", "dtype", "include_top", "input_shape", "mean"),
    *("name", "output_stride", "pooling", "std"),
    *("bias_initializer", "dropout", "dropout_at", "dropout_varies", "kernel_initializer"),
    *("stochastic_depth", "zero_init_last", "stacked", *stacks.OPTIONS),
)
#: The weights in this package, in half precision: MODEL.NAME.weights.h5.
TRAINED = Path(__file__).with_name("trained")


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """A named model.

    Args:
        name: Name in `kp.list_models()`; a created model has the same name.
        builder: The function of `kp.models` that builds it.
        arguments: Arguments of the builder in JSON's types, without classes and input
            shape.
        input_shape: Shape of an input without the batch, channels last.
        classes: Outputs of the classifier.
        preprocessing: Preprocessing of the model's data set.
        published: Rows of the model in the papers' tables, also for CIFAR-100.
        weights: Names of the model's weights in this package, such as `"cifar10"`.
        parameters: Exact numbers of parameters if `kp.published.PARAMETER_COUNTS` lists
            them, else None.
    """

    name: str
    builder: Callable[..., UnitNetwork]
    arguments: Mapping[str, Any] = dataclasses.field(hash=False)
    input_shape: tuple[int, ...]
    classes: int
    preprocessing: Preprocessing
    published: tuple[Result, ...] = ()
    weights: tuple[str, ...] = ()
    parameters: ParameterCount | None = None


#: Arrangement by suffix of a name.
PREACT_AND_ORIGINAL = {"preact": "full_preactivation", "original": "original"}
#: The arrangements of Table 2.
ALL_ARRANGEMENTS = {
    **PREACT_AND_ORIGINAL,
    "bn_after_addition": "bn_after_addition",
    "relu_before_addition": "relu_before_addition",
    "relu_only_preact": "relu_only_preactivation",
    "bn_only_preact": "bn_only_preactivation",
}

#: Input shape, classes and preprocessing by first word of a name. The dense networks take digits as
#: vectors.
INPUTS: Mapping[str, tuple[tuple[int, ...], int, Preprocessing]] = MappingProxyType(
    {
        "cifar": ((32, 32, 3), 10, PREPROCESSING["cifar10"]),
        "imagenet": ((224, 224, 3), 1000, PREPROCESSING["imagenet"]),
        "digits": ((8, 8, 1), 10, PREPROCESSING["digits"]),
        "dense": ((64,), 10, PREPROCESSING["digits"]),
    }
)


def _table() -> dict[str, tuple[Callable[..., UnitNetwork], dict[str, Any]]]:
    """Return each name with a builder and its arguments."""
    preact = {"arrangement": "full_preactivation"}
    digits = {"depth": 6, "width": 32, "patch_size": 2}
    table: dict[str, tuple[Callable[..., UnitNetwork], dict[str, Any]]] = {
        "cifar_fast_resnet8": (fast_resnet, {"units": 1}),
        "cifar_wide_resnet16_8": (wide_resnet, {"depth": 16, "width_factor": 8}),
        "cifar_wide_resnet28_10": (wide_resnet, {"depth": 28, "width_factor": 10}),
        "cifar_wide_resnet40_4": (wide_resnet, {"depth": 40, "width_factor": 4}),
        "imagenet_resnext50_32x4d_preact": (
            resnet_imagenet,
            {"depth": 50, **preact, "groups": 32, "base_width": 4},
        ),
        "imagenet_resnext101_32x8d_preact": (
            resnet_imagenet,
            {"depth": 101, **preact, "groups": 32, "base_width": 8},
        ),
        "digits_resnet8_preact": (resnet_cifar, {"depth": 8, **preact}),
        "digits_resnet20_preact": (resnet_cifar, {"depth": 20, **preact}),
        "digits_resnet10001_preact": (
            resnet_cifar,
            {
                "depth": 10_001,
                **preact,
                "kernel_initializer": "keras_preact>DepthScaledHe",
                "remat": 33,
            },
        ),
        "digits_vanilla10000": (
            vanilla_cnn,
            {
                "depth": 10_000,
                "filters": 16,
                # no gain and no biases: the best isometry at so few channels
                "kernel_initializer": "keras_preact>DeltaOrthogonal",
                "use_bias": False,
                "remat": 100,
            },
        ),
        "digits_transformer6_preln": (transformer, {"arrangement": "pre_norm", **digits}),
        "digits_transformer6_postln": (
            transformer,
            {"arrangement": "post_norm", **digits},
        ),
        "dense_resnet6": (dense_resnet, {"depth": 6}),
        "dense_resnet12": (dense_resnet, {"depth": 12}),
    }
    for depth in (20, 32, 44, 56, 110, 164, 1001, 1202):
        # the paper compares all arrangements at two depths
        arrangements = ALL_ARRANGEMENTS if depth in (110, 164) else PREACT_AND_ORIGINAL
        for suffix, arrangement in arrangements.items():
            arguments = {"depth": depth, "arrangement": arrangement}
            table[f"cifar_resnet{depth}_{suffix}"] = (resnet_cifar, arguments)
    for depth in IMAGENET_DEPTHS:
        for suffix, arrangement in PREACT_AND_ORIGINAL.items():
            arguments = {"depth": depth, "arrangement": arrangement}
            table[f"imagenet_resnet{depth}_{suffix}"] = (resnet_imagenet, arguments)
    return table


def _entry(name: str, builder: Callable[..., UnitNetwork], arguments: dict) -> ModelEntry:
    """Make an entry from a row of the table."""
    family = name.split("_")[0]
    input_shape, classes, preprocessing = INPUTS[family]

    def is_published(result: Result) -> bool:
        options = {key: value for key, value in result.arguments.items() if key != "classes"}
        # networks for digits have the same arguments as networks for CIFAR
        on_this_data = result.dataset.startswith(family)
        return on_this_data and result.builder == builder.__name__ and options == arguments

    parameters = None
    if family == "cifar" and builder is resnet_cifar:
        depth, arrangement = arguments["depth"], arguments["arrangement"]
        # the counts are for basic units in every arrangement, and bottlenecks in one
        if arrangement == "full_preactivation" or depth not in (164, 1001):
            parameters = PARAMETER_COUNTS[f"ResNet-{depth}"]
    return ModelEntry(
        name=name,
        builder=builder,
        arguments=ReadOnly(arguments),
        input_shape=input_shape,
        classes=classes,
        preprocessing=preprocessing,
        published=tuple(filter(is_published, RESULTS)),
        weights=tuple(path.name.split(".")[1] for path in sorted(TRAINED.glob(f"{name}.*.h5"))),
        parameters=parameters,
    )


def _natural(row: tuple[str, Any]) -> list[int | str]:
    """Return a sort key of a row in which resnet20 comes before resnet110."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", row[0])]


#: `ModelEntry` by name, in natural order.
MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {name: _entry(name, *row) for name, row in sorted(_table().items(), key=_natural)}
)


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of the models that match the shell pattern `pattern`, with
    resnet20 before resnet110.

    Example:

    >>> import keras_preact as kp
    >>> kp.list_models("cifar_resnet[2-5]*_original")  # doctest: +NORMALIZE_WHITESPACE
    ['cifar_resnet20_original', 'cifar_resnet32_original', 'cifar_resnet44_original',
     'cifar_resnet56_original']
    """
    return [name for name in MODELS if fnmatch.fnmatchcase(name, pattern)]


def model_entry(name: str) -> ModelEntry:
    """Return the entry of a named model.

    Raises:
        ValueError: for an unknown name; the message lists the nearest ones.

    Example:

    >>> import keras_preact as kp
    >>> entry = kp.model_entry("cifar_resnet164_preact")
    >>> dict(entry.arguments), entry.parameters.trainable
    ({'depth': 164, 'arrangement': 'full_preactivation'}, 1703258)
    >>> [(row.table, row.dataset, row.error) for row in entry.published]
    [('2', 'cifar10', 5.46), ('3', 'cifar10', 5.46), ('3', 'cifar100', 24.33)]
    """
    if isinstance(name, str) and name in MODELS:
        return MODELS[name]
    parts = [known for known in MODELS if name and str(name) in known]
    close = difflib.get_close_matches(str(name), MODELS, n=3, cutoff=0.0)
    near = list(dict.fromkeys([*parts, *close]))[:3]
    meant = f"Did you mean {' or '.join(map(repr, near))}?"
    raise ValueError(
        f"Unknown name. {other_names.advice(other_names.NETWORKS, name) or meant} "
        f"`kp.list_models()` returns all {len(MODELS)}. Received: name={name!r}"
    )


def create_model(
    name: str,
    *,
    classes: int | None = None,
    weights: str | Path | None = None,
    include_preprocessing: bool = False,
    **overrides: Any,
) -> UnitNetwork:
    """Build a named model.

    Args:
        name: A name in `kp.list_models()`.
        classes: Outputs of the classifier, such as 100 for CIFAR-100; None for the
            entry's number.
        weights: A name of weights in this package, such as `"cifar10"` (`weights` of the
            entry; models.md in the documentation lists their accuracy), or a
            `.weights.h5` or `.keras` file of the same network. None: new weights. Those of
            this package are also for stacks, and for an input with other channels: the
            stem is adapted as by `kp.weights.load`.
        include_preprocessing: Whether the model starts with the entry's mean and std,
            `(x - mean) / std`, and so takes pixel values from 0 to 255. For another data
            set, use `mean=` and `std=` instead.
        **overrides: Arguments of the builder that replace the entry's: `shortcut`,
            `input_shape`, `data_format`, `dtype`, ...

    Returns:
        A `UnitNetwork`, for most entries a `ResidualNetwork`, with the entry's name. It
        returns logits of shape `(batch, classes)`.

    Raises:
        ValueError: for an unknown name (the message lists the nearest ones), weights
            that are missing or damaged, weights of a network with other options, a mean
            and std that do not fit the input's channels, and if the builder raises one.

    Example:

    >>> import keras_preact as kp
    >>> model = kp.create_model("cifar_resnet20_preact", classes=100, include_preprocessing=True)
    >>> model.name, model.output_shape, model.layers[1].name
    ('cifar_resnet20_preact', (None, 100), 'preprocessing')
    """
    entry = model_entry(name)
    classes = entry.classes if classes is None else classes
    if weights is not None:
        weights = _check_weights(entry, weights)
    data_format = spatial.data_format_of(overrides.get("data_format"))
    arguments = {
        **entry.arguments,
        "name": name,
        "classes": classes,
        "input_shape": spatial.reordered(entry.input_shape, "channels_last", data_format),
    }
    if overrides.get("stacked") is False:
        for option in stacks.OPTIONS:  # the entry's would have no effect
            arguments.pop(option, None)
    if include_preprocessing:
        _check_preprocessing(entry, overrides, data_format == "channels_first")
        arguments |= {"mean": entry.preprocessing.mean, "std": entry.preprocessing.std}
    model = entry.builder(**arguments | overrides)
    if weights is None:
        return model
    config = model.get_config()
    is_ours = weights.parent == TRAINED
    if is_ours:
        _check_options(entry, weights, config, {"classes": classes, **overrides})
    shape = spatial.reordered(config["input_shape"], config["data_format"], "channels_last")
    if is_ours and (shape[-1] != entry.input_shape[-1] or config["stacked"]):
        _load_from_the_entry(model, weights, entry)
    else:
        _load_weights(model, weights)
    return model


def _check_weights(entry: ModelEntry, weights: str | Path) -> Path:
    if weights in entry.weights:
        return _packaged(entry, str(weights))
    path = Path(str(weights))
    if not path.name.endswith(WEIGHT_SUFFIXES):
        known = {other.name: other.weights for other in MODELS.values() if other.weights}
        advice = other_names.advice(other_names.WEIGHTS, weights)
        raise ValueError(
            f"`weights` must be a {' or '.join(WEIGHT_SUFFIXES)} file, or a name of weights in "
            f"this package, which has {known}. {advice}{' ' * bool(advice)}Received: "
            f"name={entry.name!r}, weights={str(weights)!r}"
        )
    if not path.is_file():
        raise ValueError(f"`weights` is not an existing file. Received: weights={str(weights)!r}")
    return path


def _packaged(entry: ModelEntry, weights: str) -> Path:
    """Return the file of weights in this package."""
    path = TRAINED / f"{entry.name}.{weights}.weights.h5"
    expected = json.loads(path.with_name(f"{entry.name}.{weights}.json").read_text())["sha256"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != expected:
        raise ValueError(
            f"{path} is damaged: its SHA-256 is {digest}, expected {expected}. Install "
            f"keras-preact again. Received: weights={weights!r}"
        )
    return path


def _check_options(
    entry: ModelEntry, weights: Path, config: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Check that the network with these options, which has this config, has the weights of
    this package.
    """
    own = {**entry.arguments, "classes": entry.classes}
    fixed = [name for name in options if name not in OPTIONAL and options[name] != own.get(name)]
    if not fixed:
        return
    trained = entry.builder(**own).get_config()
    differ = {name for name in config if config[name] != trained.get(name)} - set(OPTIONAL)
    if differ:
        # an option may have another name in the config, as the widths that width_factor changes
        changed = ", ".join(
            f"{name}={options[name]!r}" for name in fixed if name in differ or name not in config
        )
        label = weights.name.split(".")[1]
        raise ValueError(
            f"The weights {label!r} are for {entry.name!r} without {changed}. Leave that out, "
            "or change the loaded network: kp.transfer.reset_classifier for other classes. "
            f"Received: weights={label!r}, {changed}"
        )


def _load_weights(model: UnitNetwork, path: Path) -> None:
    with warnings.catch_warnings():
        # Keras warns of layers that are not in the file; they would keep their new weights
        warnings.filterwarnings("error", "Skipping nested container")
        try:
            model.load_weights(path)
        except (OSError, KeyError, UserWarning, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"The file is damaged or holds the weights of another network than {model.name!r} "
                f"with these arguments. Received: weights={str(path)!r}. Keras says: {error}"
            ) from error


def _load_from_the_entry(model: UnitNetwork, path: Path, entry: ModelEntry) -> None:
    """Load the weights of a network without stacks for the channels of the entry."""
    source = changed_copy(
        model,
        [layer.name for layer in model.layers],
        stacked=False,
        input_shape=entry.input_shape,
        data_format="channels_last",
        mean=None,
        std=None,
    )
    _load_weights(source, path)
    entries = [named_weights.Entry(name, name) for name in named_weights.named(source)]
    named_weights.load(model, named_weights.extract(source, entries), entries)


def _check_preprocessing(
    entry: ModelEntry, overrides: Mapping[str, Any], channels_first: bool
) -> None:
    """Check that the entry's mean and std fit the input and are the only ones."""
    advice = "give mean= and std= in place of include_preprocessing=True"
    if statistics := {key: overrides[key] for key in ("mean", "std") if key in overrides}:
        received = ", ".join(f"{key}={value!r}" for key, value in statistics.items())
        raise ValueError(f"For other statistics than the entry's, {advice}. Received: {received}")
    shape = overrides.get("input_shape")
    known = len(entry.preprocessing.mean)
    # all features of a vector share one mean and std, so any number of features fits
    if shape and len(shape) == 3 and shape[0 if channels_first else -1] != known:
        raise ValueError(
            f"The mean and std of {entry.name!r} are for {known} channels: {advice}. Received: "
            f"input_shape={tuple(shape)}"
        )
