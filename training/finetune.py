"""The start of a fine-tuning: a trained network from a file, with a classifier for the run's classes."""

import dataclasses
from pathlib import Path

import keras
import numpy as np

from keras_preact import transfer
from keras_preact.models.base import UnitNetwork

from . import networks
from .checkpoints import Checkpoints
from .cli import UserError, command
from .config import START, Config
from .data import ImageData

#: Options of --model that may change in a trained network: its weights stay the same.
CHANGEABLE = ("dropout", "stochastic_depth", "remat", "dtype")


def check(config: Config) -> None:
    """Check that the options of a fine-tuning go together, before anything is read.

    Raises:
        UserError: if they do not.
    """
    model = config.model
    if model.weights is None:
        if not model.name:
            raise UserError(
                "Fine-tuning starts from a trained network: --model.weights takes the directory of a run, or a .keras file."
            )
        for option in ("freeze", "mean", "std"):
            if getattr(model, option):
                raise UserError(f"--model.{option} is for a network from --model.weights.")
        return
    default = type(model)()
    given = [
        field.name
        for field in dataclasses.fields(model)
        if field.name not in (*START, *CHANGEABLE) and getattr(model, field.name) != getattr(default, field.name)
    ]
    if given:
        option = given[0].replace("_", "-")
        raise UserError(f"--model.{option} makes a new network, and that of --model.weights is trained: leave it out.")
    if bool(model.mean) != bool(model.std):
        raise UserError("Give both --model.mean and --model.std, or none of them.")


def begin(config: Config, data: ImageData) -> tuple[Config, ImageData, UnitNetwork]:
    """Read the network that the run starts from, and bring the rest into line with it.

    A run that goes on starts from its own last checkpoint: the file may have changed since, or be gone.

    Args:
        config: With `model.weights`.
        data: The run's data set.

    Returns:
        The configuration with the network's name and the size of its images; the data with the preprocessing that the network
        was trained with; the network with a classifier for the data's classes, frozen as configured.

    Raises:
        UserError: for a file that is missing, damaged or of another kind, images of other channels or a size that does not
            fit, options that do not.
    """
    own = _own(config, data)
    source = _read(config) if own is None else own
    if config.model.name not in ("", source.name):
        raise UserError(f"--model.weights is for the recipe finetune. Received: --model.name {config.model.name}")
    height, width, channels = _shape(source)
    if channels != data.channels:
        raise UserError(f"{source.name} takes images of {channels} channels, and those of {data.name} have {data.channels}.")
    size = config.data.size or data.size or (height if height == width else None)
    if size is None:
        raise UserError(f"The images of {data.name} differ in size, and {source.name} takes any: give --data.size.")
    if data.size is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, size=size))
    if own is None and config.model.mean and source.get_config()["mean"] is not None:
        raise UserError(f"{source.name} has a preprocessing layer of its own: leave out --model.mean and --model.std.")
    mean, std = _preprocessing(config, source, channels)
    data = dataclasses.replace(data, standard=dataclasses.replace(data.standard, mean=mean, std=std), measured=False)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name=source.name))
    if own is not None:
        return config, data, own
    changes = {option: getattr(config.model, option) for option in CHANGEABLE if getattr(config.model, option) is not None}
    shape = (size, size, channels)
    try:
        network = transfer.changed_copy(source, data_format="channels_last", input_shape=shape, mean=mean, std=std, **changes)
    except ValueError as error:
        raise UserError(f"{source.name} cannot be had for images of {size} x {size} pixels as configured: {error}") from error
    network = transfer.reset_classifier(network, len(data.classes))
    if config.model.freeze is not None:
        transfer.freeze(network, config.model.freeze)
    return config, data, network


def _own(config: Config, data: ImageData) -> UnitNetwork | None:
    """Return the network of the run that goes on, without its weights, if it has come to a checkpoint."""
    run = config.output
    if not config.resume or run is None or Checkpoints(run / "checkpoints").newest(lambda message: None) is None:
        return None
    network = _checked(networks.architecture(run), run)
    if network.output_shape[-1] != len(data.classes):
        before, now = network.output_shape[-1], len(data.classes)
        raise UserError(f"{run} was begun with {before} classes, and {config.data.dir or data.name} has {now}.")
    return network


def _read(config: Config) -> UnitNetwork:
    path = config.model.weights
    assert path is not None
    if path.is_dir():
        model, _ = networks.open_run(path)
    elif not path.is_file():
        raise UserError(f"--model.weights names no file and no directory. Received: {path}")
    elif path.suffix != ".keras":
        raise UserError(
            f"--model.weights takes the directory of a run, or a .keras file: {command('convert')} makes one of other files. "
            f"Received: {path}"
        )
    else:
        model = networks.load(path)
    return _checked(model, path)


def _checked(model: keras.Model, path: Path) -> UnitNetwork:
    if not isinstance(model, UnitNetwork) or len(model.input_shape) != 4:
        raise UserError(f"{path} holds no network of residual units for images, but {model.name!r}.")
    return model


def _shape(model: UnitNetwork) -> tuple[int | None, int | None, int]:
    """Return height, width and channels of the images that the network takes."""
    shape = model.input_shape[1:]
    return shape if model.get_config()["data_format"] == "channels_last" else (*shape[1:], shape[0])


def _preprocessing(config: Config, source: UnitNetwork, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std, one a channel, that the network was trained with."""
    own = source.get_config()
    mean, std = own["mean"], own["std"]
    if mean is None and std is None:
        mean, std = config.model.mean, config.model.std
        if not mean:
            raise UserError(
                f"{source.name} has no preprocessing layer: give what it was trained with, in pixel values, as --model.mean "
                "and --model.std, a number for each channel."
            )
        if (len(mean), len(std)) != (channels, channels):
            raise UserError(f"--model.mean and --model.std must hold {channels} numbers each. Received: {mean} and {std}")
    values = (0.0 if mean is None else mean), (1.0 if std is None else std)
    means, stds = (tuple(np.broadcast_to(value, channels).tolist()) for value in values)
    return means, stds
