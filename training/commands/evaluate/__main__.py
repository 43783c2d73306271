"""Evaluate a run or a model on the test images: `keras-preact evaluate`."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from ... import cli, disk, functions
from ...cli.programs import answering
from ...config import Data, DataDir, DataName
from ...directory import measurements
from ...errors import UserError, check_positive, checking, command
from . import corruptions as corrupted
from . import mistakes
from .classifier import Classifier, open_classifier
from .drawing import draw_confusion, draw_reliability
from .metrics import measure, reliability, report
from .views import Views, average_logits


def evaluate(
    subject: Annotated[Path, tyro.conf.Positional],
    /,
    checkpoint: Literal["final", "best", "last"] = "final",
    data: DataName = None,
    data_dir: DataDir = None,
    batch_size: Annotated[int, tyro.conf.arg(aliases=["--batch"])] = 256,
    output: Path | None = None,
    save_samples: int = 0,
    save_errors: int = 0,
    views: Views = "one",
    corruptions: Path | None = None,
    trust: bool = False,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> Path:
    """Measure accuracy on the test images, in total and for each class.

    Writes metrics.json, confusion_matrix.png and reliability.png. Measurements of a run
    with another checkpoint, several views or other images have files of their own:
    metrics-best.json, metrics-flip.json, metrics-on-NAME.json and so on. For a run with
    held-out images, the temperature that calibrates the probabilities is fitted on them.

    Args:
        subject: A run directory, a .keras file, an exported model (saved_models/NAME), or
            MODEL:WEIGHTS for weights in this package, such as
            cifar_resnet20_preact:cifar10.
        checkpoint: Network of the run: at its end, at its best epoch or at its last
            checkpoint.
        data: Data set (see `keras-preact train`). If not given: the one that the run
            was trained on.
        data_dir: Directory of the data set.
        batch_size: Images per step.
        output: Folder for the results. If not given: the run directory, or
            evaluation-NAME for a file.
        save_samples: Also write this many test images to samples/, one of each class in
            turn.
        save_errors: Also write predictions.csv, a row for each test image, and errors.png,
            this many wrong images with the highest probabilities (at most 100).
        views: Views of every image, whose logits are averaged. flip: the image and its
            mirror image. flip_shift: also both moved by a pixel up left and down right;
            these four together count as much as the first two.
        corruptions: Folder of CIFAR-10-C (labels.npy, and a NAME.npy for each corruption):
            also measure the error under each corruption.
        trust: Run the code that its files name: the function that loads the data, and your
            own parts of the network.
        as_json: Print the content of metrics.json on stdout, and nothing else there.
    """
    from ... import data as datasets

    # --- What is measured, and on which images
    check_positive(batch_size=batch_size)
    if save_samples < 0:
        raise UserError(f"--save-samples must be 0 or more. Received: {save_samples}")
    if not 0 <= save_errors <= mistakes.MOST:
        raise UserError(f"--save-errors must be 0 to {mistakes.MOST}. Received: {save_errors}")
    with answering(as_json) as answer:
        with checking():
            trusting = command("evaluate", subject, "--trust")
            opened = open_classifier(subject, checkpoint, "" if trust else trusting)
            source = _source(opened, subject, data, data_dir)
            if data is None and source.is_function:
                functions.trust([source.name], subject, trusting, trust)
            images = datasets.load(source)
        if opened.preprocessing is not None:
            images = dataclasses.replace(images, standard=opened.preprocessing)
        classes = measurements.fitting_classes(subject, opened.classes, opened.outputs, images)
        _check_shape(subject, opened.shape, images, source.size)
        for note in images.notes:
            print(f"Warning: {note}")

        folder = output or opened.output
        disk.make(folder, "--output")

        # --- Measure
        is_own = opened.described is None or measurements.are_of_run(
            images, source, opened.described
        )
        metrics, curves, logits, labels = _measure(
            opened, images, source.size, classes, batch_size, views, is_own
        )
        if corruptions is not None:
            metrics["corruptions"] = corrupted.measure(
                corruptions,
                lambda pixels: average_logits(opened.logits, pixels, views),
                opened.shape,
                opened.outputs,
                batch_size,
            )

        # --- Write
        suffix = measurements.suffix(checkpoint, views, None if is_own else source)
        answer(report(metrics), metrics)
        written = _write(metrics, curves, folder, suffix)
        if not is_own:
            # an image that was added to class folders may move another one to the test images
            is_share = source.test and data_dir is None
            trained = " It may have been trained on some of them (--data.test)." if is_share else ""
            print(
                f"These are not the test images of the run: {command('compare')} and "
                f"{command('export')} do not use this measurement.{trained}"
            )
        if save_samples > 0:
            count = _save_samples(images, folder / "samples", save_samples)
            written_to = f"{folder / 'samples'}, named INDEX_CLASS.png"
            print(f"Wrote {count} test image{'s' * (count > 1)} to {written_to}.")
        if save_errors > 0:
            files = mistakes.write(
                images.test, logits, labels, classes, save_errors, folder, suffix
            )
            print(f"Wrote {' and '.join(file.name for file in files)}.")
        return written


def _measure(
    opened: Classifier,
    images,
    size: int | None,
    classes: list[str],
    batch_size: int,
    views: Views,
    is_own: bool,
) -> tuple[dict, dict[str, tuple], np.ndarray, np.ndarray]:
    """Return metrics, reliability curves, logits and labels of the test images, and print
    why the probabilities were not calibrated.

    Args:
        is_own: Whether the images are of the data that the network was trained on.
    """
    classify = functools.partial(_classify, opened, images, batch_size, size, views)
    logits, labels = classify(images.test)
    about = {
        "model": str(opened.path),
        "hashes": {"model": measurements.hash_of(opened.path), "test": images.test.hash},
        "data": images.name,
        "split": "test",
        "views": views,
        "precision": opened.precision,
    }
    metrics = about | measure(logits, labels, classes)
    curves = {"as trained": reliability(logits, labels)}
    if is_own and measurements.has_other_held_out(images, opened.described):
        metrics["not_calibrated"] = "The held-out images are not the run's."
    elif images.holdout is not None:
        temperature = _temperature(*classify(images.holdout))
        if isinstance(temperature, str):
            metrics["not_calibrated"] = temperature
        else:
            curves[f"logits / {temperature:.3g}"] = reliability(logits / temperature, labels)
            again = measure(logits / temperature, labels, classes)
            metrics["calibrated"] = {
                "temperature": temperature,
                "held_out_images": images.holdout.size,
                "loss": again["loss"],
                "calibration_error": again["calibration_error"],
            }
    if "not_calibrated" in metrics:
        print(f"The probabilities were not calibrated. {metrics['not_calibrated']}")
    return metrics, curves, logits, labels


def _classify(
    opened: Classifier, images, batch_size: int, size: int | None, views: Views, split
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits (images, classes) and the labels (images) of a split."""
    from ... import data

    logits, labels = [], []
    batches = data.evaluation_batches(images, split, batch_size, size)
    with images.name_broken_images():
        for batch, batch_labels in batches.as_numpy_iterator():
            logits.append(average_logits(opened.logits, batch, views))
            labels.append(batch_labels)
    return np.concatenate(logits).astype("float64"), np.concatenate(labels)


def _temperature(logits: np.ndarray, labels: np.ndarray) -> float | str:
    """Return the temperature that calibrates the probabilities, or why there is none."""
    from keras_preact.transfer import fit_temperature

    try:
        return fit_temperature(logits, labels)
    except ValueError as error:
        return f"{str(error).removesuffix('.')}."


def _write(metrics: dict, curves: dict[str, tuple], folder: Path, suffix: str) -> Path:
    """Write the metrics and their pictures. Return the file of the metrics."""
    written = folder / f"metrics{suffix}.json"
    confusion = folder / f"confusion_matrix{suffix}.png"
    reliable = folder / f"reliability{suffix}.png"
    disk.write_json(written, metrics)
    with disk.replacing(confusion) as temporary:
        classes = list(metrics["per_class"])
        draw_confusion(np.array(metrics["confusion_matrix"]), classes, temporary)
    with disk.replacing(reliable) as temporary:
        draw_reliability(curves, temporary)
    print(f"Wrote {written}, {confusion.name} and {reliable.name}.")
    return written


def _source(opened: Classifier, subject: Path, data: str | None, data_dir: Path | None) -> Data:
    """Return the data set to measure on: the named one, or the one of the training."""
    if data is not None and (opened.data is None or data != opened.data.name):
        return Data(name=data, dir=data_dir, size=opened.size)
    if opened.data is None:
        raise UserError(
            f"{subject} does not say which data it was trained on. Name it: --data digits"
        )
    return opened.data if data_dir is None else dataclasses.replace(opened.data, dir=data_dir)


def _check_shape(subject: Path, shape: Sequence[int | None], images, size: int | None) -> None:
    """Check that a network takes the images of a data set, resized to `size` if it is given."""
    side = size or images.size
    given = (side, side, images.channels)
    if any(own not in (None, one) for own, one in zip(shape, given, strict=True)):
        raise UserError(
            f"{subject} takes images of shape {tuple(shape)}: height, width, channels. The data "
            f"set {images.name} has images of shape {given}. Choose other images with --data or "
            "--data-dir."
        )


def _save_samples(images, folder: Path, count: int) -> int:
    """Write `count` test images as PNG files, the first of every class, then the second
    of every class, and so on. Return the number of files.
    """
    from PIL import Image

    from ...data.images import keep

    disk.make(folder)
    seen: collections.Counter[int] = collections.Counter()
    places = []
    for number, label in enumerate(images.test.all_labels().tolist()):
        places.append((seen[label], label, number))
        seen[label] += 1
    chosen = sorted(sorted(places)[:count], key=lambda place: place[2])
    numbers = np.array([number for _, _, number in chosen])
    pictures = images.test.open(keep(numbers, len(places))).as_numpy_iterator()
    for (rank, label, _), (image, _) in zip(chosen, pictures, strict=True):
        name = f"{rank}_{images.classes[label].replace('/', '-')}.png"
        with disk.replacing(folder / name) as temporary:
            Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(temporary)
    return len(chosen)


def main(argv: Sequence[str]) -> None:
    cli.main("evaluate", evaluate, argv)
