"""Export a run for serving: `keras-preact export`."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from rich import filesize

from . import cli

if TYPE_CHECKING:
    import keras

#: Test images for the comparison of accuracies of an export in bfloat16.
IMAGES = 2_000


def export(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    name: str,
    output: Path = Path("saved_models"),
    version: int | None = None,
    checkpoint: Literal["final", "best", "last"] = "final",
    format: Literal["saved_model", "onnx", "litert"] = "saved_model",
    precision: Literal["float32", "bfloat16"] = "float32",
    fold_batch_norm: bool = True,
    data_dir: Path | None = None,
) -> None:
    """Write a run's network for serving: saved_models/NAME/VERSION, a SavedModel that
    needs no Keras, and its model card.

    Its outputs are compared with the network's first; if they differ, nothing is
    written.

    Args:
        run: The run directory.
        name: Name of the exported model.
        output: Folder of exported models.
        version: Number of the new version. If not given: the highest plus one.
        checkpoint: Network of the run: at its end, at its best epoch or at its last
            checkpoint.
        format: A SavedModel for servers, or one file for ONNX Runtime or LiteRT.
        precision: bfloat16 is faster on CPUs with AMX. The accuracy on test images is
            compared first.
        fold_batch_norm: Whether batch normalisations are folded into the weights before
            them.
        data_dir: Directory of the test images, for bfloat16. If not given: that of the
            run.
    """
    if name != Path(name).name or name.startswith("."):
        raise cli.UserError(
            "--name must be a plain name, such as digits; the folder is set by --output. "
            f"Received: {name!r}"
        )
    if format != "saved_model" and (version is not None or precision != "float32"):
        raise cli.UserError(
            f"--format {format} writes one float32 file: remove --version and --precision."
        )

    from . import runs

    config = runs.read_config(run)

    import keras_preact as kp

    from . import networks

    model, path = networks.open_run(run, checkpoint)
    described: dict[str, Any] = {
        "classes": config["classes"],
        "preprocessing": config["preprocessing"],
    }
    try:
        if format != "saved_model":
            save, ending = {
                "onnx": (kp.export.save_onnx, "onnx"),
                "litert": (kp.export.save_litert, "tflite"),
            }[format]
            output.mkdir(parents=True, exist_ok=True)
            file = save(model, output / f"{name}.{ending}", **described)
            print(f"Wrote {file} ({_size([file])}). Its outputs match {path}.")
            return
        exported = kp.export.save(
            model,
            output / name,
            **described,
            run={"directory": run.resolve().name, "checkpoint": checkpoint}
            | _without_places(config),
            metrics=_metrics_of(path, run, checkpoint),
            version=version,
            fold_batch_norm=fold_batch_norm,
            precision=precision,
            validation_data=None
            if precision == "float32"
            else _test_images(config, model, data_dir),
        )
    except (kp.export.ExportError, ImportError) as error:
        raise cli.UserError(str(error)) from error
    card = json.loads((exported / "assets.extra" / "model_card.json").read_text(encoding="utf-8"))
    files = [file for file in exported.rglob("*") if file.is_file()]
    largest, allowed = card["check"]["largest_difference"], card["check"]["allowed_difference"]
    print(
        f"Wrote {exported} ({_size(files)}, {card['parameters']['total']:,} parameters) and "
        f"{output / name / 'model_card.json'}.\n"
        f"Loaded with TensorFlow alone, its outputs match {path}: the largest difference is "
        f"{largest['logits']:.1e} in logits (allowed {allowed['logits']:.1e}), "
        f"{largest['probabilities']:.1e} in probabilities (allowed "
        f"{allowed['probabilities']:.1e})."
    )
    if accuracy := card["check"].get("accuracy"):
        print(
            f"Accuracy on {accuracy['images']} test images: {100 * accuracy['bfloat16']:.2f} % in "
            f"bfloat16, {100 * accuracy['model']:.2f} % in the run."
        )
    print(
        f"Next: {cli.command('predict')} {output / name} IMAGE, or {cli.command('serve')} {output}"
    )


def _test_images(
    config: dict, model: "keras.Model", data_dir: Path | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return test images of the run's data set, as its network takes them, and their
    labels.
    """
    from . import data
    from .config import Data, from_json

    source = dataclasses.replace(from_json(Data, config["config"]["data"]), holdout=0)
    images = data.load(source if data_dir is None else dataclasses.replace(source, dir=data_dir))
    batches = data.evaluation_batches(
        images, images.test, 100, model.input_shape[1]
    ).as_numpy_iterator()
    with images.naming_broken_images():
        parts = list(itertools.islice(batches, IMAGES // 100))
    pixels, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return pixels.astype("float32"), labels


def _without_places(config: dict) -> dict:
    """Return a run's config.json for the card: without what the card holds already, and
    without paths of this machine.
    """
    own = {key: value for key, value in config.items() if key not in ("classes", "preprocessing")}
    data = config["config"]["data"] | {"dir": None}
    return own | {"config": config["config"] | {"data": data, "output": None}}


def _metrics_of(path: Path, run: Path, checkpoint: str) -> dict | None:
    """Return what `evaluate` has measured on the model in `path`, the run's network of
    that checkpoint.
    """
    file = run / ("metrics.json" if checkpoint == "final" else f"metrics-{checkpoint}.json")
    metrics = json.loads(file.read_text()) if file.is_file() else {}
    if Path(metrics.get("model", "")).name == path.name:
        return {key: value for key, value in metrics.items() if key != "model"}
    option = "" if checkpoint == "final" else f" --checkpoint {checkpoint}"
    print(
        f"The model card has no metrics. To add them, run {cli.command('evaluate')} {run}{option} "
        "before the export."
    )
    return None


def _size(files: Iterable[Path]) -> str:
    return filesize.decimal(sum(file.stat().st_size for file in files))


def main(argv: Sequence[str]) -> None:
    cli.main("export", export, argv)
