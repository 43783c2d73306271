"""Convert weights between this package and other libraries: `keras-preact convert`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from . import cli

FormatName = Literal[
    "auto", "keras_preact", "keras_applications", "keras_hub", "timm", "pytorchcv", "torch_cifar"
]


def convert(
    source: Annotated[Path, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    /,
    source_format: FormatName = "auto",
    target_format: FormatName = "auto",
    classes: int | None = None,
    input_shape: tuple[int, int, int] | None = None,
    check: Path | None = None,
    half: bool = False,
    overwrite: bool = False,
) -> None:
    """Convert the weights of a pre-activation network between libraries. Nothing is
    loaded or written by half.

    Args:
        source: File to read: .keras, .h5 (keras.applications), .safetensors, .pth, .pt,
            .bin or .npz (timm, pytorchcv, Torch).
        out: File to write: .keras, .weights.h5 or .safetensors.
        source_format: Format of the source. auto: found from its content.
        target_format: Format to write. auto: this package's own; for .safetensors the
            names of timm or of the Torch code.
        classes: Number of classes. Another number than the source's gets a new
            classifier.
        input_shape: Height, width and channels of the images. The first kernel is
            adapted to other channels.
        check: An .npz file with `images` and `outputs`, what the source's network returns
            for them. Nothing is written if the converted network returns something else.
        half: Write a .weights.h5 file in 16 bits (float16): half the size. Networks read it
            as any other.
        overwrite: Replace an existing file.
    """
    from . import formats

    formats.convert(
        source, out, source_format, target_format, classes, input_shape, check, half, overwrite
    )


def main(argv: Sequence[str]) -> None:
    cli.main("convert", convert, argv)
