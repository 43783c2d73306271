"""Convert weights between this package and other libraries: `keras-preact convert`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from rich import filesize

from .. import cli, disk
from ..errors import UserError, checking, reading

if TYPE_CHECKING:
    import keras

    from keras_preact.models.network import ResidualNetwork

FormatName = Literal[
    "auto", "keras_preact", "keras_applications", "keras_hub", "timm", "pytorchcv", "torch_cifar"
]

#: Sizes that a conversion may change, and what it does then.
_ADAPTED = {
    "Channels": "The first kernel was adapted",
    "Classes": "The classifier is new and must be trained",
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
        name = formats.source_format(source, content, source_format)
        read = formats.FORMATS[name].read
        sample = None if check is None else _sample(check, name)
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
        target = _target_format(out, model) if target_format == "auto" else target_format
        converted = formats.FORMATS[target].write(model)
    with disk.replacing(out) as temporary:
        _write(converted, temporary, half)
    print(f"Read {source} ({name}): {model.name}, {model.count_params():,} parameters.")
    if name in weights.ASSUMPTIONS and sample is None:
        print(weights.ASSUMPTIONS[name], "--check compares with outputs of the source.")
    before, after = _sizes(as_is), _sizes(model)
    for what, how in _ADAPTED.items():
        if before[what] != after[what]:
            print(f"{what}: {after[what]} instead of {before[what]}. {how}.")
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


def _sample(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images of a file, and the outputs of the source's network for them."""
    from keras_preact import weights

    if name not in weights.ASSUMPTIONS:
        raise UserError(f"--check is for weights of other libraries. Received: {name} weights")
    message = "--check must be an .npz file with the arrays `images` and `outputs`. Received"
    with reading(f"{message}: {path}"), np.load(path) as arrays:
        return arrays["images"], arrays["outputs"]


def _target_format(out: Path, model: "ResidualNetwork") -> str:
    if out.suffix != ".safetensors":
        return "keras_preact"
    return "torch_cifar" if model.arguments.get("stem") == "3x3" else "timm"


def _write(converted: "keras.Model | Mapping[str, np.ndarray]", path: Path, half: bool) -> None:
    """Write a model, or arrays by name, with `half` in float16."""
    from keras_preact import weights

    if isinstance(converted, Mapping):
        weights.write_state(path, converted)
    elif path.name.endswith(".weights.h5"):
        converted.save_weights(path)
    else:
        converted.save(path)
    if half:
        _halve(path)


def _halve(path: Path) -> None:
    """Convert the float32 arrays of a .weights.h5 file to float16.

    Raises:
        UserError: for weights that float16 cannot hold.
    """
    import h5py

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


def _sizes(model: "ResidualNetwork") -> dict[str, int]:
    config = model.get_config()
    axis = 0 if config["data_format"] == "channels_first" else -1
    classes = 0 if model.logits is None else model.logits.shape[-1]
    return {"Channels": config["input_shape"][axis], "Classes": classes}


def main(argv: Sequence[str]) -> None:
    cli.main("convert", convert, argv)
