"""Start a fine-tuning: read a trained network, and give it a classifier for the run's
classes.
"""

import dataclasses
from pathlib import Path

import keras
import numpy as np

from keras_preact import transfer
from keras_preact.models.base import UnitNetwork

from ..config import Config
from ..data import ImageData
from ..directory import formats, models, runs
from ..directory.checkpoints import Checkpoints
from ..errors import UserError, command
from . import networks
from .checks import CHANGEABLE


def begin(config: Config, data: ImageData) -> tuple[Config, ImageData, UnitNetwork]:
    """Read the network that the run starts from, and adapt configuration and data to
    it.

    A resumed run starts from its own last checkpoint: the file may have changed since,
    or no longer exist.

    Args:
        config: Configuration with `model.weights`.
        data: The run's data set.

    Returns:
        The configuration with the network's name and the size of its images; the data
        with the preprocessing that the network was trained with; the network with a
        classifier for the data's classes, frozen as configured.

    Raises:
        UserError: for a file that is missing, damaged or of another kind, and for
            images or options that do not fit the network.
    """
    resumed = _resumed(config, data)
    source, pixels = _read(config) if resumed is None else (resumed, None)
    if config.model.name not in ("", source.name):
        raise UserError(
            "--model.weights belongs to the recipe finetune, without --model.name. Received: "
            f"{config.model.name}"
        )
    height, width, channels = _shape(source)
    if channels != data.channels:
        raise UserError(
            f"{source.name} takes {_colour(channels)} images; {config.data.dir or data.name} has "
            f"{_colour(data.channels)} images. Train a new network on them with {command('train')} "
            "folder, or start from a network for such images."
        )
    size = networks.image_size(config, data, height if height == width else None)
    if resumed is None and config.model.mean and source.arguments["mean"] is not None:
        raise UserError(
            f"{source.name} has its own preprocessing layer. Remove --model.mean and --model.std."
        )
    mean, std = _preprocessing(config, source, channels, pixels)
    data = dataclasses.replace(
        data, standard=dataclasses.replace(data.standard, mean=mean, std=std), measured=False
    )
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, name=source.name),
        data=config.data if data.size else dataclasses.replace(config.data, size=size),
    )
    if resumed is not None:
        return config, data, resumed
    options = {option: getattr(config.model, option) for option in CHANGEABLE}
    changes = {option: value for option, value in options.items() if value is not None}
    shape = (size, size, channels)
    try:
        network = transfer.changed_copy(
            source, data_format="channels_last", input_shape=shape, mean=mean, std=std, **changes
        )
    except ValueError as error:
        raise UserError(
            f"{source.name} cannot be adapted to images of {size} x {size} pixels: {error}"
        ) from error
    network = transfer.reset_classifier(network, len(data.classes))
    if config.model.freeze is not None:
        transfer.freeze(network, config.model.freeze)
    return config, data, network


def _resumed(config: Config, data: ImageData) -> UnitNetwork | None:
    """Return the network of a resumed run that has a checkpoint, without its weights;
    None for a new run.
    """
    run = config.output
    if (
        not config.resume
        or run is None
        or Checkpoints(run / "checkpoints").newest(lambda message: None) is None
    ):
        return None
    network = _checked(models.architecture(run), run)
    if network.output_shape[-1] != len(data.classes):
        before, now = network.output_shape[-1], len(data.classes)
        raise UserError(
            f"{run} was started with {before} classes; {config.data.dir or data.name} now has "
            f"{now}."
        )
    return network


def _read(config: Config) -> tuple[UnitNetwork, tuple[float, float] | None]:
    """Return the trained network, and the mean and std of the pixels for networks of its
    library that have no layer for them, if they are known.
    """
    path = config.model.weights
    pixels: tuple[float, float] | None = None
    assert path is not None
    if path.is_dir():
        _check_parts(path)
        model, _ = models.open_run(path)
    elif path.is_file() and path.name.endswith(formats.SOURCES):
        model, pixels = formats.network(path)
    elif ":" in str(path):
        model = models.shipped(str(path))
    else:
        raise UserError(
            "--model.weights must be an existing run directory, an existing file of weights "
            f"({', '.join(formats.SOURCES)}), or MODEL:WEIGHTS such as "
            f"cifar_resnet20_preact:cifar10 or ResNet50V2:imagenet. Received: {path}"
        )
    return _checked(model, path), pixels


def _check_parts(run: Path) -> None:
    """Refuse a network with parts of a person: the fine-tuned run would not name them."""
    if own := runs.parts_of(run):
        raise UserError(
            f"--model.weights {run} has parts of your own, {', '.join(own)}, which fine-tuning "
            "does not load. In Python, kp.transfer.reset_classifier gives its model another "
            "classifier."
        )


def _checked(model: keras.Model, path: Path) -> UnitNetwork:
    if not isinstance(model, UnitNetwork) or len(model.input_shape) != 4:
        raise UserError(
            f"--model.weights needs a network of residual units for images. {path} contains "
            f"{model.name!r}."
        )
    return model


def _shape(model: UnitNetwork) -> tuple[int | None, int | None, int]:
    """Return height, width and channels of the network's images."""
    shape = model.input_shape[1:]
    return shape if model.arguments["data_format"] == "channels_last" else (*shape[1:], shape[0])


def _colour(channels: int) -> str:
    return {1: "grayscale (1 channel)", 3: "colour (3 channels)"}.get(
        channels, f"{channels}-channel"
    )


def _preprocessing(
    config: Config,
    source: UnitNetwork,
    channels: int,
    pixels: tuple[float, float] | None,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and std per channel that the network was trained with. `pixels` are
    those of its library.
    """
    mean, std = source.arguments["mean"], source.arguments["std"]
    if mean is None and std is None and pixels and not config.model.mean:
        mean, std = pixels
    elif mean is None and std is None:
        mean, std = config.model.mean, config.model.std
        if not mean:
            raise UserError(
                f"{source.name} has no preprocessing layer. Add the mean and standard deviation "
                "of its training pixels (0 to 255) with --model.mean and --model.std, one number "
                "per channel."
            )
        if (len(mean), len(std)) != (channels, channels):
            raise UserError(
                f"--model.mean and --model.std need {channels} numbers each. Received: {mean} and "
                f"{std}"
            )
    values = (0.0 if mean is None else mean), (1.0 if std is None else std)
    means, stds = (tuple(np.broadcast_to(value, channels).tolist()) for value in values)
    return means, stds
