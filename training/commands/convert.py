"""Convert weights between this package and other libraries: `keras-preact convert`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import filesize

from .. import cli, disk
from ..errors import UserError, checking

FormatName = Literal[
    "auto", "keras_preact", "keras_applications", "keras_hub", "timm", "pytorchcv", "torch_cifar"
]

#: Sizes that a conversion may change, and what it does then.
_ADAPTED = {
    "channels": "the first kernel was adapted",
    "classes": "the classifier is new and must be trained",
}


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
    """Convert the weights of a pre-activation network between libraries. It loads and
    writes all weights, or none.

    Args:
        source: File to read: .keras, .h5 (keras.applications), .safetensors, .pth, .pt,
            .bin or .npz (timm, pytorchcv, Torch).
        out: File to write: .keras, .weights.h5 or .safetensors.
        source_format: Format of the source. auto: detect it from the content.
        target_format: Format to write. auto: this package's own; for .safetensors the
            names of timm or of the Torch code.
        classes: Number of classes. If the source has another number, the classifier is
            new.
        input_shape: Height, width and channels of the images. The first kernel is
            adapted to another number of channels.
        check: An .npz file with `images` and `outputs`, the outputs of the source's network
            for them. Nothing is written if the converted network returns something else.
        half: Write a .weights.h5 file in 16 bits (float16): half the size. Networks load
            it like any other file.
        overwrite: Replace an existing file.
    """
    from keras_preact import weights

    from ..directory import formats

    _check(out, target_format, half, overwrite)
    with checking():
        content = formats.open(source)
        name = formats.source_format(source, content) if source_format == "auto" else source_format
        read = formats.FORMATS[name].read
        sample = None if check is None else formats.sample(check, name)
        try:
            if sample is not None:
                read(content, check=sample, input_shape=sample[0].shape[1:])
            model = as_is = read(content)
            sizes: dict[str, Any] = {} if classes is None else {"classes": classes}
            if input_shape is not None:
                channels_first = model.arguments["data_format"] == "channels_first"
                sizes["input_shape"] = (
                    (input_shape[2], *input_shape[:2]) if channels_first else input_shape
                )
            if sizes:
                model = read(content, **sizes)
        except weights.WeightsMismatch as error:
            raise UserError(f"{source}: {error}. Nothing was written.") from error
        target = formats.target_format(out, model) if target_format == "auto" else target_format
        converted = formats.FORMATS[target].write(model)
    with disk.replacing(out) as temporary:
        formats.write(converted, temporary, half)
    print(f"Read {source} ({name}): {model.name}, {model.count_params():,} parameters.")
    if name in weights.ASSUMPTIONS and sample is None:
        print(weights.ASSUMPTIONS[name], "--check compares with outputs of the source.")
    before, after = formats.sizes(as_is), formats.sizes(model)
    for what, how in _ADAPTED.items():
        if before[what] != after[what]:
            print(f"{after[what]} {what} instead of {before[what]}: {how}.")
    print(f"Wrote {out} ({target}, {filesize.decimal(out.stat().st_size)}).")


def _check(out: Path, target_format: FormatName, half: bool, overwrite: bool) -> None:
    """Check that the file may be written, and has an ending of its format."""
    from ..directory import formats

    if out.exists() and not (overwrite and out.is_file()):
        if out.is_file():
            raise UserError(
                f"{out} exists already. Add --overwrite to replace it, or choose another name."
            )
        raise UserError(f"{out} is a folder. Choose another name.")
    if not out.parent.is_dir():
        raise UserError(f"The folder {out.parent} does not exist.")
    any_file = (*formats.MODEL_FILES, *formats.STATE_FILES)
    endings = any_file if target_format == "auto" else formats.FORMATS[target_format].endings
    if not out.name.endswith(endings):
        raise UserError(
            f"--target-format {target_format} writes {' or '.join(endings)} files. Received: {out}"
        )
    if half and not out.name.endswith(".weights.h5"):
        raise UserError(f"--half is for .weights.h5 files. Received: {out}")


def main(argv: Sequence[str]) -> None:
    cli.main("convert", convert, argv)
