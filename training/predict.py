"""Classify image files with an exported model: `python -m training.predict saved_models/NAME IMAGE ...`.

Needs TensorFlow, Pillow and NumPy, no Keras. What was wrong with an image's size is said on stderr.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from PIL import Image, ImageOps

from training import cli

#: Number of channels to Pillow's mode.
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclasses.dataclass(frozen=True)
class Card:
    """What a model card says about the images and the classes.

    Args:
        classes: Their names, in the order of the outputs.
        mode: Pillow's mode of the images.
        size: Width and height of the images, None where the model takes any.
        preprocessing: That of `kp.preprocessing.Preprocessing`, if the card has one.
        normalize: Whether the client has to subtract the mean and divide by the std.
    """

    classes: list[str]
    mode: str
    size: tuple[int, int] | None
    preprocessing: dict[str, Any]
    normalize: bool


def predict(
    model: Annotated[Path, tyro.conf.Positional],
    images: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    top: int = 3,
    version: int | None = None,
) -> None:
    """Print the most probable classes of images.

    Args:
        model: The directory of an exported model, saved_models/NAME.
        images: Image files.
        top: How many classes of each.
        version: Of the model; by default the highest.
    """
    if not images:
        raise cli.UserError("Give at least one image file behind the model's directory.")
    if top < 1:
        raise cli.UserError(f"--top must be at least 1. Received: {top}")
    path = version_path(model, version)
    card = read_card(path)
    pixels = [read_image(image, card) for image in images]  # all of them, before the first is classified
    serve, loaded = _load(path)
    width = max(map(len, card.classes))
    for image, values in zip(images, pixels, strict=True):
        probabilities = serve(images=_tensor(values, card))["probabilities"][0].numpy()
        if not np.isfinite(probabilities).all():
            raise cli.UserError(f"{path} gives {image} probabilities that are not numbers: its weights are damaged.")
        print(image)
        for i in np.argsort(-probabilities, kind="stable")[:top]:
            print(f"  {card.classes[i]:<{width}}  {100 * probabilities[i]:6.2f} %")
    del loaded  # a signature alone does not keep its weights


def version_path(model: Path, version: int | None) -> Path:
    """Return the directory of a version of an exported model, the highest for None."""
    if not model.is_dir():
        others = sorted(str(card.parent) for card in model.parent.glob("*/model_card.json"))
        there = f"There is: {', '.join(others)}." if others else "python -m training.export writes one."
        raise cli.UserError(f"There is no exported model {model}. {there}")
    versions = sorted(int(entry.name) for entry in model.iterdir() if entry.name.isdecimal())
    if not versions:
        raise cli.UserError(f"{model} is no exported model: it has no version (a folder with a number for its name).")
    if version is not None and version not in versions:
        raise cli.UserError(f"{model} has no version {version}. It has: {', '.join(map(str, versions))}.")
    return model / str(version or versions[-1])


def read_card(path: Path) -> Card:
    """Return what the card of a version says."""
    files = [path / "assets.extra" / "model_card.json", path.parent / "model_card.json"]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise cli.UserError(f"{path} has no model_card.json, which holds the names of the classes.")
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
        inputs = card["signature"]["inputs"]["images"]
        shape = inputs["shape"]
        classes = card["classes"]
        preprocessing = card["preprocessing"] or {}
    except (ValueError, KeyError, TypeError) as error:
        raise cli.UserError(f"{file} is no model card of this project: {error!r}") from error
    if len(shape) != 4 or shape[3] not in MODES:
        raise cli.UserError(f"{path} takes arrays of shape {shape}, which image files do not hold.")
    return Card(
        classes=classes,
        mode=MODES[shape[3]],
        size=None if None in shape[1:3] else (shape[2], shape[1]),
        preprocessing=preprocessing,
        normalize=not inputs["normalized_in_graph"] and "mean" in preprocessing,
    )


def read_image(path: Path, card: Card) -> np.ndarray:
    """Return an image as the model takes it, uint8 `(height, width, channels)`.

    Raises:
        UserError: if it cannot be read; the message holds the reason.
    """
    try:
        with Image.open(path) as opened:
            image = _convert(ImageOps.exif_transpose(opened), card.mode)
    except Exception as error:  # Pillow's decoders raise errors of many kinds for a damaged file
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "it is no image that Pillow knows"
        raise cli.UserError(f"Cannot read the image {path}: {reason}") from error
    if card.size and image.size != card.size:
        was, now = ("{} x {}".format(*size) for size in (image.size, card.size))
        image, done = _resize(image, card)
        print(f"note: {path} is {was} pixels, the model takes {now}: {done}.", file=sys.stderr)
    array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def _convert(image: Image.Image, mode: str) -> Image.Image:
    """Return an image in `mode`, 8 bits a channel."""
    if image.mode.startswith("I;16"):  # Pillow would cut off what lies above 255
        image = Image.fromarray((np.asarray(image, "uint16") >> 8).astype("uint8"))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _resize(image: Image.Image, card: Card) -> tuple[Image.Image, str]:
    """Bring an image to the model's size as the model was evaluated; return it and what was done."""
    assert card.size
    if card.preprocessing.get("resize") and card.preprocessing.get("crop") == "center":
        scale = card.preprocessing["resize"] / card.preprocessing["size"]
        fitted = ImageOps.fit(image, tuple(round(n * scale) for n in card.size), Image.Resampling.BILINEAR)
        left, above = ((a - b) // 2 for a, b in zip(fitted.size, card.size, strict=True))
        return fitted.crop((left, above, left + card.size[0], above + card.size[1])), "scaled, and its centre cut out"
    return image.resize(card.size, Image.Resampling.BILINEAR), "resized"


def _tensor(pixels: np.ndarray, card: Card):
    import tensorflow as tf

    values = pixels.astype("float32")
    if card.normalize:
        values = (values - np.float32(card.preprocessing["mean"])) / np.float32(card.preprocessing["std"])
    return tf.constant(values[None])


def _load(path: Path):
    """Return the serving function of a SavedModel, and the model, which must be kept as long."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    try:
        loaded = tf.saved_model.load(str(path))
        return loaded.signatures["serving_default"], loaded
    except (tf.errors.OpError, KeyError) as error:
        raise cli.UserError(f"{path} is damaged: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    cli.main(predict, argv)


if __name__ == "__main__":
    main()
