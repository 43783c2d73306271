"""Formats of weights: how their files are recognised, read and written."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from keras_preact import weights
from keras_preact.models.base import UnitNetwork
from keras_preact.models.network import ResidualNetwork
from keras_preact.weights import files, pytorchcv, timm, torch_cifar

from ..errors import UserError, reading
from . import models

MODEL_FILES, STATE_FILES = (".keras", ".weights.h5"), (".safetensors",)
#: Endings of the files that are read.
SOURCES = (".keras", ".h5", *files.READERS)


def _with_sizes(model: ResidualNetwork, **sizes: Any) -> ResidualNetwork:
    """Return a network of this package, or one with its weights and other sizes."""
    if not isinstance(model, UnitNetwork):
        raise UserError(
            "--source-format keras_preact is for a .keras file with a network of this package."
        )
    if not sizes:
        return model
    twin = type(model).from_config(model.get_config() | sizes)
    entries = [weights.Entry(path, path) for path in weights.named(model)]
    weights.load(twin, weights.extract(model, entries), entries)
    return twin


def _is_of(package: str) -> Callable[[Any], bool]:
    return lambda content: (
        isinstance(content, keras.Model) and type(content).__module__.partition(".")[0] == package
    )


def _is_state(fits: Callable[[Mapping[str, Any]], bool]) -> Callable[[Any], bool]:
    return lambda content: isinstance(content, Mapping) and fits(content)


def write(converted: keras.Model | Mapping[str, np.ndarray], path: Path, half: bool) -> None:
    """Write a model, or arrays by name, with `half` in float16."""
    if isinstance(converted, Mapping):
        weights.write_state(path, converted)
    elif path.name.endswith(".weights.h5"):
        converted.save_weights(path)
    else:
        converted.save(path)
    if half:
        _halve(path)


@dataclasses.dataclass(frozen=True)
class Format:
    """A library's format of weights.

    Args:
        is_source: Whether the content of a file (a model, a mapping of names to arrays,
            the path of an .h5 file) has this format.
        read: Function from the content to a network of this package; `input_shape` and
            `classes` adapt it.
        write: Function from a network of this package to the model, or the arrays by
            name, that is written.
        endings: Endings of the files that are written.
        pixels: Mean and standard deviation of the pixels (0 to 255) that the library's
            trained networks take. None: they differ.
    """

    is_source: Callable[[Any], bool]
    read: Callable[..., ResidualNetwork]
    write: Callable[[ResidualNetwork], Any]
    endings: tuple[str, ...]
    pixels: tuple[float, float] | None = None


#: Formats by name, in the order in which they are tried on a source.
FORMATS: Mapping[str, Format] = {
    "keras_preact": Format(
        lambda content: isinstance(content, UnitNetwork),
        _with_sizes,
        lambda model: model,
        MODEL_FILES,
    ),
    "keras_hub": Format(
        _is_of("keras_hub"),
        weights.from_keras_hub,
        weights.to_keras_hub,
        (".keras",),
    ),
    "keras_applications": Format(
        lambda content: isinstance(content, keras.Model | Path),
        weights.from_keras_applications,
        weights.to_keras_applications,
        MODEL_FILES,
        (127.5, 127.5),
    ),
    **{
        name: Format(
            _is_state(fits),
            getattr(weights, f"from_{name}"),
            getattr(weights, f"to_{name}"),
            STATE_FILES,
            (127.5, 127.5) if name == "timm" else None,
        )
        for name, fits in {
            "timm": timm.is_timm,
            "pytorchcv": pytorchcv.is_pytorchcv,
            "torch_cifar": torch_cifar.is_torch_cifar,
        }.items()
    },
}


def _halve(path: Path) -> None:
    """Convert the float32 arrays of a .weights.h5 file to float16.

    Raises:
        UserError: for weights that float16 cannot hold.
    """
    with h5py.File(path) as file:
        arrays: dict[str, np.ndarray] = {}
        file.visititems(
            lambda name, item: (
                arrays.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None
            )
        )
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            with np.errstate(over="ignore"):  # checked below
                half = array.astype("float16") if array.dtype == "float32" else array
            if not np.isfinite(half).all():
                raise UserError(f"{name} has values beyond float16: remove --half.")
            file.create_dataset(name, data=half)


def sample(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a file, and the outputs of the source's network for them."""
    if name not in weights.ASSUMPTIONS:
        raise UserError(f"--check is for weights of other libraries. Received: {name} weights")
    message = "--check must be an .npz file with the arrays `images` and `outputs`. Received"
    with reading(f"{message}: {path}"), np.load(path) as arrays:
        return arrays["images"], arrays["outputs"]


def target_format(out: Path, model: ResidualNetwork) -> str:
    if out.suffix != ".safetensors":
        return "keras_preact"
    return "torch_cifar" if model.arguments.get("stem") == "3x3" else "timm"


def open(source: Path) -> Any:
    """Return the content of a file, a model or arrays by name. Return the path of an .h5
    file, which may hold either.
    """
    if source.suffix in files.READERS:
        return weights.read_state(source)
    if not source.is_file():
        raise UserError(f"The file {source} does not exist.")
    if source.suffix == ".h5":
        return source
    if source.suffix != ".keras":
        raise UserError(f"SOURCE must end in {' or '.join(SOURCES)}. Received: {source}")
    return models.load(source)


def source_format(source: Path, content: Any) -> str:
    name = next((name for name, row in FORMATS.items() if row.is_source(content)), None)
    if name is None:
        content_names = (
            f"It has {', '.join([*content][:5])}." if isinstance(content, Mapping) else ""
        )
        raise UserError(
            f"The format of {source} is unknown. {content_names} Name it with --source-format: "
            f"{', '.join(FORMATS)}."
        )
    return name


def network(path: Path) -> tuple[keras.Model, tuple[float, float] | None]:
    """Return the network in a file of any format, and the format's `pixels`.

    Raises:
        UserError: for a file that holds none.
    """
    with reading(f"{path} holds no network of residual units for images"):
        content = open(path)
        row = FORMATS[source_format(path, content)]
        return row.read(content), row.pixels


def sizes(model: ResidualNetwork) -> dict[str, int]:
    config = model.get_config()
    axis = 0 if config["data_format"] == "channels_first" else -1
    classes = 0 if model.logits is None else model.logits.shape[-1]
    return {"channels": config["input_shape"][axis], "classes": classes}
