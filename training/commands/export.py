"""Export a run for serving: `keras-preact export`."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from rich import filesize

from .. import cli, disk
from ..config import Data, DataDir, from_json
from ..directory import measurements, runs
from ..errors import UserError, check_positive, check_utf8, checking, command, writing
from ..functions import trust

if TYPE_CHECKING:
    import keras

#: Number of test images on which the accuracy of an export in bfloat16 or int8 is compared.
IMAGES = 2_000
#: Dtype policy of a network that computes as an export does, by the export's precision.
POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
#: Number of training images on which NNCF measures the ranges of activations; NNCF's default.
CALIBRATION_IMAGES = 300


def export(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    name: str,
    output: Path = Path("saved_models"),
    version: int | None = None,
    checkpoint: Literal["final", "best", "last"] = "final",
    format: Literal["saved_model", "onnx", "litert"] = "saved_model",
    precision: Literal["float32", "bfloat16", "int8"] = "float32",
    fold_batch_norm: bool = True,
    temperature: Literal["fitted"] | float = 1.0,
    data_dir: DataDir = None,
    trust: bool = False,
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
        precision: Precision of the exported network; that of the training does not
            matter. bfloat16 is faster on CPUs with AVX512_BF16 or AMX. int8 adds the
            network in 8 bits for `serve --engine openvino`, faster on most CPUs, and
            measures 300 training images for it. The accuracy on test images is compared
            first, and may fall by at most half a point.
        fold_batch_norm: Fold batch normalisations into the weights before them.
        temperature: Number that the logits are divided by, for calibrated probabilities.
            fitted: the one that `keras-preact evaluate` fitted on held-out images.
        data_dir: Directory of the images, for bfloat16 and int8. If not given: the run's
            own.
        trust: Run the code that config.json of the run names: your own parts of the network
            and, for bfloat16 and int8, the function that loads the data.
    """
    if name != Path(name).name or name.startswith("."):
        raise UserError(
            "--name must be a plain name, such as digits; the folder is set by --output. "
            f"Received: {name!r}"
        )
    check_utf8(output / name, "--output and --name")
    check_positive(version=version)
    if temperature != "fitted" and not 0 < temperature < math.inf:
        raise UserError(f"--temperature must be positive, or fitted. Received: {temperature}")
    is_plain = version is None and precision == "float32" and fold_batch_norm
    if format != "saved_model" and not is_plain:
        raise UserError(
            f"--format {format} writes one float32 file, and its converter folds batch "
            "normalisations: remove --version, --precision and --no-fold-batch-norm."
        )
    if data_dir is not None and precision == "float32":
        raise UserError(
            "--data.dir is for --precision bfloat16 and int8: an export in float32 reads no "
            f"images. Received: {data_dir}"
        )

    config = runs.read_config(run)

    import keras_preact as kp

    from ..directory import models

    again = command("export", run, "--name", name, "--trust")
    model, path = models.open_run(run, checkpoint, "" if trust else again)
    metrics = measurements.of_run(run, config, path, checkpoint)
    if metrics is None and format == "saved_model":
        option = [] if checkpoint == "final" else ["--checkpoint", checkpoint]
        print(
            "The model card has no metrics. To add them, run "
            f"{command('evaluate', run, *option)} before the export."
        )
    if temperature == "fitted":
        temperature = _fitted_temperature(metrics, config, run, checkpoint)
    model = _divided(model, temperature)
    # the card is about the export, and its metrics about the network of the run
    about = {"temperature": temperature, "precision": models.precision(model)}
    described = {"classes": config["classes"], "preprocessing": config["preprocessing"]}
    try:
        if format != "saved_model":
            with checking():
                _save_file(model, output / name, format, described, path)
            return
        images = _images(run, config, model, data_dir, precision, trust)
        with checking(), writing(output / name, "--output"):
            exported = kp.export.save(
                model,
                output / name,
                **described,
                run={"directory": run.resolve().name, "checkpoint": checkpoint}
                | {key: value for key, value in config.items() if key not in described}
                | {"config": runs.portable(config["config"])},
                metrics=metrics and _portable(metrics) | about,
                version=version,
                fold_batch_norm=fold_batch_norm,
                precision=precision,
                **images,
            )
    except (kp.export.ExportError, ImportError) as error:
        raise UserError(str(error)) from error
    takes_files = _report(exported, path, precision)
    if metrics and about["precision"] != POLICIES.get(precision):
        print(
            f"The metrics in the card were measured in {about['precision']}, in the run. To "
            f"measure the export: {command('evaluate', output / name)}"
        )
    predict = f"{command('predict', output / name, 'IMAGE')}, or " if takes_files else ""
    print(f"Next: {predict}{command('serve', output)}")


def _save_file(
    model: "keras.Model", path: Path, format: str, described: dict[str, Any], source: Path
) -> None:
    """Write one file for another runtime, and print what was written."""
    import keras_preact as kp

    save, ending = {
        "onnx": (kp.export.save_onnx, "onnx"),
        "litert": (kp.export.save_litert, "tflite"),
    }[format]
    disk.make(path.parent, "--output")
    file = save(model, path.with_name(f"{path.name}.{ending}"), **described)
    size = filesize.decimal(file.stat().st_size)
    print(f"Wrote {file} ({size}). Its outputs match {source}.")


def _images(
    run: Path,
    config: dict,
    model: "keras.Model",
    data_dir: Path | None,
    precision: str,
    is_trusted: bool,
) -> dict[str, Any]:
    """Return the images that `kp.export.save` needs for a precision, as its arguments:
    test images with their labels, and training images, at the size of the network.
    """
    if precision == "float32":
        return {}
    from .. import data

    source = dataclasses.replace(from_json(Data, config["config"]["data"]), holdout=0)
    if source.is_function:
        again = command("export", run, "--precision", precision, "--trust", "...")
        trust([source.name], run / "config.json", again, is_trusted)
    images = data.load(source if data_dir is None else dataclasses.replace(source, dir=data_dir))
    measurements.fitting_classes(run, config["classes"], len(config["classes"]), images)

    def read(split, most: int) -> tuple[np.ndarray, np.ndarray]:
        # from the whole split: a folder's images are sorted by class
        step = -(-split.size // most)
        batches = data.evaluation_batches(
            images, split, 100 * step, model.input_shape[1], slice(0, None, step)
        ).as_numpy_iterator()
        with images.name_broken_images():
            chosen = list(itertools.islice(batches, most // 100))
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
        return pixels.astype("float32"), labels

    arguments: dict[str, Any] = {"validation_data": read(images.test, IMAGES)}
    if precision == "int8":
        arguments["calibration_images"] = read(images.train, CALIBRATION_IMAGES)[0]
    return arguments


def _portable(metrics: dict) -> dict:
    """Return metrics without the file and the hashes of this machine."""
    return {key: value for key, value in metrics.items() if key not in ("model", "hashes")}


def _fitted_temperature(
    metrics: dict | None, config: Mapping[str, Any], run: Path, checkpoint: str
) -> float:
    if metrics is not None and "calibrated" in metrics:
        return metrics["calibrated"]["temperature"]
    option = [] if checkpoint == "final" else ["--checkpoint", checkpoint]
    again = f"Run {command('evaluate', run, *option)} first: it fits one on the held-out images."
    if config.get("images", {}).get("holdout") == 0:
        again = "The run has no held-out images: train with --data.holdout 0.1."
    reason = (metrics or {}).get("not_calibrated", again)
    raise UserError(f"The metrics of {run} have no temperature. {reason}")


def _divided(model: "keras.Model", temperature: float) -> "keras.Model":
    """Return the network with its logits divided by the temperature."""
    from keras_preact.transfer import apply_temperature

    if temperature == 1:
        return model
    with checking():
        model = apply_temperature(model, temperature)
    print(f"Its logits are divided by {temperature:.3g}.")
    return model


def _report(exported: Path, source: Path, precision: str) -> bool:
    """Print what was written and how it compares with the network in `source`. Return
    whether it takes image files.
    """
    from keras_preact.export.version import CARD, Version

    with Version(exported).reading_card() as card:
        parameters, check = card["parameters"]["total"], card["check"]
        takes_files = "predict_bytes" in card["signatures"]
    size = sum(file.stat().st_size for file in exported.rglob("*") if file.is_file())
    print(
        f"Wrote {exported} ({filesize.decimal(size)}, {parameters:,} parameters) "
        f"and {exported.with_name(CARD)}.\n"
        f"Loaded with TensorFlow alone, its outputs match {source}. The largest differences:"
    )
    for key, largest in check["largest_difference"].items():
        print(f"  {key} {largest:.1e} (allowed {check['allowed_difference'][key]:.1e})")
    if accuracy := check.get("accuracy"):
        print(
            f"Accuracy on {accuracy['images']} test images: {100 * accuracy[precision]:.2f} % in "
            f"{precision}, {100 * accuracy['model']:.2f} % in the run."
        )
    return takes_files


def main(argv: Sequence[str]) -> None:
    cli.main("export", export, argv)
