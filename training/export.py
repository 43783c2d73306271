"""Export a run for serving: `python -m training.export RUN --name NAME [--option value ...]`.

Writes saved_models/NAME/VERSION, a TensorFlow SavedModel that needs no Keras, and the model card beside it. See
saved_models/README.md. `--format onnx` or `litert` writes one file for other runtimes instead.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import keras
import numpy as np
import tyro

from . import cli

#: Test images that the accuracy of an export in bfloat16 is compared on.
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
    """Export the network of a training run.

    Args:
        run: The run directory.
        name: Of the model; the folder in `output`, or the file's name without its ending.
        output: Where exported models are.
        version: A number that is not taken; by default one more than the highest.
        checkpoint: Which of the run's models.
        format: What is written: a directory for servers, or a file for ONNX Runtime or LiteRT.
        precision: bfloat16 is faster on CPUs with AMX; the accuracy on test images is compared first.
        fold_batch_norm: Fold batch normalisations into the weights in front of them.
        data_dir: Where the test images are, for bfloat16; by default where the run had them.
    """
    if name != Path(name).name or name.startswith("."):
        raise cli.UserError(
            f"--name must be the name of a folder, such as digits. Received: {name!r}. For its place: --output"
        )
    if format != "saved_model" and (version is not None or precision != "float32"):
        raise cli.UserError(f"--format {format} writes one file in float32: leave --version and --precision out.")

    import keras_preact as kp

    from . import networks, runs

    config = runs.read_config(run)
    model, path = networks.open_run(run, checkpoint)
    described: dict[str, Any] = {"classes": config["classes"], "preprocessing": config["preprocessing"]}
    try:
        if format != "saved_model":
            save, ending = {"onnx": (kp.export.save_onnx, "onnx"), "litert": (kp.export.save_litert, "tflite")}[format]
            output.mkdir(parents=True, exist_ok=True)
            file = save(model, output / f"{name}.{ending}", **described)
            print(f"Written: {file}, {_size([file])}. Checked against {path}.")
            return
        exported = kp.export.save(
            model,
            output / name,
            **described,
            run={"directory": run.resolve().name, "checkpoint": checkpoint} | _without_places(config),
            metrics=_metrics_of(path, run),
            version=version,
            fold_batch_norm=fold_batch_norm,
            precision=precision,
            validation_data=None if precision == "float32" else _test_images(config, model, data_dir),
        )
    except (kp.export.ExportError, ImportError) as error:
        raise cli.UserError(str(error)) from error
    card = json.loads((exported / "assets.extra" / "model_card.json").read_text(encoding="utf-8"))
    files = [file for file in exported.rglob("*") if file.is_file()]
    largest, allowed = card["check"]["largest_difference"], card["check"]["allowed_difference"]
    print(
        f"Written: {exported}, {len(files)} files, {_size(files)} "
        f"(weights: {_size((exported / 'variables').iterdir())}, {card['parameters']['total']:,} parameters)\n"
        f"Written: {output / name / 'model_card.json'}\n"
        f"Checked with TensorFlow alone against {path}: the logits differ by up to {largest['logits']:.1e} "
        f"(allowed: {allowed['logits']:.1e}), the probabilities by {largest['probabilities']:.1e} "
        f"({allowed['probabilities']:.1e})."
    )
    if accuracy := card["check"].get("accuracy"):
        print(
            f"Of {accuracy['images']} test images {100 * accuracy['bfloat16']:.2f} % are right in bfloat16, "
            f"{100 * accuracy['model']:.2f} % before."
        )
    print(f"Next: {cli.command('predict')} {output / name} IMAGE.png, or python -m keras_preact.serving {output}")


def _test_images(config: dict, model: keras.Model, data_dir: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Return test images of the run's data set, as its network takes them, and their labels."""
    from . import data
    from .config import Data, from_json

    source = dataclasses.replace(from_json(Data, config["config"]["data"]), holdout=0)
    images = data.load(source if data_dir is None else dataclasses.replace(source, dir=data_dir))
    batches = data.evaluation_batches(images, images.test, 100, model.input_shape[1]).as_numpy_iterator()
    parts = list(itertools.islice(batches, IMAGES // 100))
    pixels, labels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return pixels.astype("float32"), labels


def _without_places(config: dict) -> dict:
    """Return a run's config.json for the card: without what the card holds already, and without paths of this machine."""
    own = {key: value for key, value in config.items() if key not in ("classes", "preprocessing")}
    data = config["config"]["data"] | {"dir": None}
    return own | {"config": config["config"] | {"data": data, "output": None}}


def _metrics_of(path: Path, run: Path) -> dict | None:
    """Return the run's metrics.json if it was measured on the model in `path`."""
    file = run / "metrics.json"
    metrics = json.loads(file.read_text()) if file.is_file() else {}
    if Path(metrics.get("model", "")).name == path.name:
        return {key: value for key, value in metrics.items() if key != "model"}
    print(f"The card gets no metrics: {cli.command('evaluate')} {run} measures them before an export.")
    return None


def _size(files) -> str:
    size = sum(file.stat().st_size for file in files)
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


if __name__ == "__main__":
    cli.main(export)
