"""Formats of weights: how their files are recognised and read, and what converts to them."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

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


def source_format(source: Path, content: Any, asked: str = "auto") -> str:
    """Return the format of a file with this content: the one that a person asks for, if it
    can be.
    """
    name = next((name for name, row in FORMATS.items() if row.is_source(content)), None)
    if asked != "auto":
        if name is not None and not FORMATS[asked].is_source(content):
            raise UserError(f"{source} has the format {name}: remove --source-format {asked}.")
        return asked
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
