"""Evaluate a run or a model on the test images: `keras-preact evaluate`."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from .. import cli, disk, functions
from ..config import Data, from_json
from ..directory import measurements, runs
from ..errors import UserError, check_positive, checking, command, reading
from . import corruptions as corrupted

Views = Literal["one", "flip", "flip_shift"]
#: Number of equal intervals of confidence in which it is compared with the accuracy.
CONFIDENCE_BINS = 15
#: Words of the report for each choice of views.
VIEWS: dict[str, str] = {"one": "", "flip": ", 2 views each", "flip_shift": ", 6 views each"}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network to evaluate.

    Args:
        path: File or directory of the model.
        output: Folder for the results.
        outputs: Number of classes.
        size: Height and width of its images, None for any.
        logits: Function from float32 pixels to logits.
        precision: Dtype policy in which the network computes, or precision of an export.
        data: Data set that it was trained on, if known.
        classes: Names of its classes, if known.
        described: Content of the config.json of its run; None without a run.
    """

    path: Path
    output: Path
    outputs: int
    size: int | None
    logits: Callable[[np.ndarray], np.ndarray]
    precision: str
    data: Data | None
    classes: Sequence[str] | None = None
    described: Mapping[str, Any] | None = None


def evaluate(
    subject: Annotated[Path, tyro.conf.Positional],
    /,
    checkpoint: Literal["final", "best", "last"] = "final",
    data: str | None = None,
    data_dir: Path | None = None,
    batch_size: int = 256,
    output: Path | None = None,
    save_samples: int = 0,
    views: Views = "one",
    corruptions: Path | None = None,
    trust: bool = False,
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
        views: Views of every image, whose logits are averaged. flip: the image and its
            mirror image. flip_shift: also both moved by a pixel up left and down right;
            these four together count as much as the first two.
        corruptions: Folder of CIFAR-10-C (labels.npy, and a NAME.npy for each corruption):
            also measure the error under each corruption.
        trust: Call the function that loads the data of the run, which its files name.
    """
    from keras_preact.transfer import fit_temperature

    from .. import data as datasets

    check_positive(batch_size=batch_size)
    if save_samples < 0:
        raise UserError(f"--save-samples must be 0 or more. Received: {save_samples}")
    with checking():
        opened = _open(subject, checkpoint)
        source = _source(opened, subject, data, data_dir)
        if data is None and source.is_function:
            trusting = command("evaluate", subject, "--trust")
            functions.trust([source.name], subject, trusting, trust)
        images = datasets.load(source)
    classes = measurements.fitting_classes(subject, opened.classes, opened.outputs, images)
    for note in images.notes:
        print(f"Warning: {note}")

    classify = functools.partial(_classify, opened, images, batch_size, source.size, views)
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
    is_own = opened.described is None or measurements.are_of_run(images, source, opened.described)
    if is_own and measurements.has_other_held_out(images, opened.described):
        print("The probabilities were not calibrated: the held-out images are not the run's.")
    elif images.holdout is not None:
        try:
            temperature = fit_temperature(*classify(images.holdout))
        except ValueError as error:
            print(f"The probabilities were not calibrated. {error}.")
        else:
            curves[f"logits / {temperature:.3g}"] = reliability(logits / temperature, labels)
            again = measure(logits / temperature, labels, classes)
            metrics["calibrated"] = {
                "temperature": temperature,
                "held_out_images": images.holdout.size,
                "loss": again["loss"],
                "calibration_error": again["calibration_error"],
            }
    if corruptions is not None:
        metrics["corruptions"] = corrupted.measure(
            corruptions,
            lambda pixels: average_logits(opened.logits, pixels, views),
            opened.outputs,
            batch_size,
        )
    folder = output or opened.output
    disk.make(folder)
    suffix = measurements.suffix(checkpoint, views, None if is_own else source)
    written = _write(metrics, curves, folder, suffix)
    if not is_own:
        print(
            f"These are not the test images of the run: {command('compare')} and "
            f"{command('export')} do not use this measurement."
        )
    if save_samples > 0:
        count = _save_samples(images, folder / "samples", save_samples)
        print(f"Wrote {count} test images to {folder / 'samples'}, named INDEX_CLASS.png.")
    return written


def _classify(
    opened: Subject, images, batch_size: int, size: int | None, views: Views, split
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits (images, classes) and the labels (images) of a split."""
    from .. import data

    logits, labels = [], []
    batches = data.evaluation_batches(images, split, batch_size, size)
    with images.name_broken_images():
        for batch, batch_labels in batches.as_numpy_iterator():
            logits.append(average_logits(opened.logits, batch, views))
            labels.append(batch_labels)
    return np.concatenate(logits).astype("float64"), np.concatenate(labels)


def _write(metrics: dict, curves: dict[str, tuple], folder: Path, suffix: str) -> Path:
    """Write the metrics and their pictures, and print the metrics. Return the file of the
    metrics.
    """
    written = folder / f"metrics{suffix}.json"
    confusion = folder / f"confusion_matrix{suffix}.png"
    reliable = folder / f"reliability{suffix}.png"
    disk.write_json(written, metrics)
    with disk.replacing(confusion) as temporary:
        classes = list(metrics["per_class"])
        draw_confusion(np.array(metrics["confusion_matrix"]), classes, temporary)
    with disk.replacing(reliable) as temporary:
        draw_reliability(curves, temporary)
    print(report(metrics))
    print(f"Wrote {written}, {confusion.name} and {reliable.name}.")
    return written


def _source(opened: Subject, subject: Path, data: str | None, data_dir: Path | None) -> Data:
    """Return the data set to measure on: the named one, or the one of the training."""
    if data is not None and (opened.data is None or data != opened.data.name):
        return Data(name=data, dir=data_dir, size=opened.size)
    if opened.data is None:
        raise UserError(
            f"{subject} does not say which data it was trained on. Name it: --data digits"
        )
    return opened.data if data_dir is None else dataclasses.replace(opened.data, dir=data_dir)


def average_logits(
    logits: Callable[[np.ndarray], np.ndarray], images: np.ndarray, views: Views
) -> np.ndarray:
    """Return the mean logits of some views of images (batch, height, width, channels). The
    images that are not moved count twice.
    """
    if views == "one":
        return logits(images)
    plain = (logits(images) + logits(np.ascontiguousarray(images[:, :, ::-1]))) / 2
    if views == "flip":
        return plain
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    moved = [
        average_logits(logits, np.ascontiguousarray(view), "flip")
        for view in (padded[:, :-2, :-2], padded[:, 2:, 2:])
    ]
    return plain / 2 + sum(moved) / 4


def measure(logits: np.ndarray, labels: np.ndarray, classes: list[str]) -> dict:
    """Return the metrics of a classifier from its logits (images, classes) and the true
    labels (images).

    Accuracy and error are shares of 1. `accuracy_interval` is Wilson's 95 % interval for
    other images of the same kind; it does not cover other seeds. `loss` is the mean
    cross-entropy in nats. `calibration_error` is the mean distance between confidence and
    accuracy over 15 intervals of confidence, weighted by their images (arXiv 1706.04599).
    Row i, column j of `confusion_matrix` counts the images of class i that were
    classified as j.

    Raises:
        UserError: if a logit is not a finite number.
    """
    from scipy.stats import binomtest
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    logits = logits.astype("float64")
    if not np.isfinite(logits).all():
        raise UserError(
            "The network's outputs are not finite: training diverged, or the file is damaged."
        )
    predicted = logits.argmax(axis=1)
    indices = np.arange(len(classes))
    columns = precision_recall_fscore_support(labels, predicted, labels=indices, zero_division=0)
    highest = logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(axis=1)) + highest[:, 0]
    right = predicted == labels
    interval = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
    confidences, accuracies, counts = reliability(logits, labels)
    metrics: dict[str, Any] = {
        "images": len(labels),
        "accuracy": float(right.mean()),
        "accuracy_interval": [float(interval.low), float(interval.high)],
        "error": float((~right).mean()),
        "loss": float((log_sum - logits[np.arange(len(labels)), labels]).mean()),
        "calibration_error": float(np.abs(confidences - accuracies) @ counts / len(labels)),
    }
    if len(classes) > 5:
        top5 = np.argpartition(-logits, 5, axis=1)[:, :5]
        metrics["top5_accuracy"] = float((top5 == labels[:, None]).any(axis=1).mean())
    names = ("precision", "recall", "f1", "images")
    metrics["per_class"] = {
        name: dict(zip(names, (float(p), float(r), float(f), int(n)), strict=True))
        for name, p, r, f, n in zip(classes, *columns, strict=True)
    }
    metrics["confusion_matrix"] = confusion_matrix(labels, predicted, labels=indices).tolist()
    return metrics


def reliability(
    logits: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean confidence, the accuracy and the number of images in each interval
    of confidence that has images. Confidence is the largest probability.
    """
    confidence = 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    # upper limits belong to their interval, as in the source
    bins = np.ceil(confidence * CONFIDENCE_BINS).astype(int)
    counts = np.bincount(bins)
    filled = counts > 0
    sums = np.bincount(bins, confidence), np.bincount(bins, logits.argmax(axis=1) == labels)
    confidences, accuracies = (total[filled] / counts[filled] for total in sums)
    return confidences, accuracies, counts[filled]


def report(metrics: dict) -> str:
    """Return the metrics as text for a terminal."""
    width = max(5, *(len(name) for name in metrics["per_class"]))
    low, high = metrics["accuracy_interval"]
    figures = [
        f"accuracy {_percent(metrics['accuracy'])} (95 % interval {100 * low:.2f} to "
        f"{_percent(high)})",
        f"error {_percent(metrics['error'])}",
        _calibration(metrics),
    ]
    if "top5_accuracy" in metrics:
        figures.append(f"top-5 accuracy {_percent(metrics['top5_accuracy'])}")
    lines = [
        f"{metrics['model']} on {metrics['images']:,} test images of {metrics['data']}"
        f"{VIEWS[metrics['views']]}:",
        f"  {', '.join(figures)}",
    ]
    if calibrated := metrics.get("calibrated"):
        lines.append(
            f"  with logits / {calibrated['temperature']:.3g}, fitted on "
            f"{calibrated['held_out_images']:,} held-out images: {_calibration(calibrated)}"
        )
    lines.append(f"  {'class':<{width}}  precision  recall      f1  images")
    for name, row in metrics["per_class"].items():
        scores = f"{row['precision']:9.4f}  {row['recall']:6.4f}  {row['f1']:6.4f}"
        lines.append(f"  {name:<{width}}  {scores}  {row['images']:6d}")
    if errors := metrics.get("corruptions"):
        lines.append(corrupted.report(errors))
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _calibration(figures: dict) -> str:
    error = _percent(figures["calibration_error"])
    return f"loss {figures['loss']:.4f}, calibration error {error}"


def draw_reliability(curves: dict[str, tuple], path: Path) -> None:
    """Draw the accuracy over the confidence: a point per interval, with an area that grows
    with its images. `curves` has the result of `reliability` for each name.
    """
    from keras_preact.analysis.figures import style

    figure = style.new_figure(5.6, 5.2)
    title = "Accuracy by confidence; area: images"
    axes = style.styled(figure.subplots(), title, "Confidence (%)", "Accuracy (%)")
    (line,) = axes.plot([0, 100], [0, 100], "--", color=style.GREY)
    handles = {"calibrated: both are equal": line}
    for i, (name, (confidences, accuracies, counts)) in enumerate(curves.items()):
        areas = 12 + 300 * counts / counts.sum()
        axes.scatter(
            100 * confidences, 100 * accuracies, areas, style.colour(i), zorder=3, clip_on=False
        )
        handles[name] = style.sample({"color": style.colour(i), "marker": "o", "linestyle": ""})
    axes.set(xlim=(0, 100), ylim=(0, 100))
    style.legend(figure, handles)
    figure.savefig(path, format="png", dpi=120)


def draw_confusion(matrix: np.ndarray, classes: list[str], path: Path) -> None:
    """Draw a confusion matrix: a row for each true class, shaded by the share of its
    images.
    """
    from keras_preact.analysis.figures import style

    n = len(classes)
    named = n <= 50  # names of more classes would overlap
    side = min(3.2 + 0.34 * n, 16) if named else 8
    figure = style.new_figure(side + 1.4, side)
    right, images = int(np.trace(matrix)), int(matrix.sum())
    title = f"{right:,} of {images:,} images right ({100 * right / max(images, 1):.1f} %)"
    axes = style.styled(figure.subplots(), title, "Predicted class", "True class")
    axes.grid(False)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    picture = axes.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    style.colour_bar(figure, axes, picture, "Share of the true class (%)")
    if named:
        axes.set_xticks(range(n), classes, rotation=90 if max(map(len, classes)) > 2 else 0)
        axes.set_yticks(range(n), classes)
    if n <= 20:
        for (i, j), count in np.ndenumerate(matrix):
            if count:
                colour = "white" if shares[i, j] > 0.5 else style.INK
                axes.text(
                    j, i, f"{count}", ha="center", va="center", color=colour, fontsize=style.SMALL
                )
    figure.savefig(path, format="png", dpi=120)


def _open(path: Path, checkpoint: str) -> Subject:
    from ..directory import models

    if (path / "config.json").is_file():
        described = runs.read_config(path)
        data = from_json(Data, described["config"]["data"])
        opened = _of_keras(*models.open_run(path, checkpoint), path, data)
        return dataclasses.replace(opened, classes=described.get("classes"), described=described)
    if path.suffix == ".keras" and path.is_file():
        return _of_keras(models.load(path), path, Path(f"evaluation-{path.stem}"), None)
    if path.is_dir():
        return _open_saved_model(path)
    name, _, weights = str(path).partition(":")
    if weights:
        from ..data import SOURCES

        network = models.shipped(str(path))
        known = Data(weights) if weights in SOURCES else None
        return _of_keras(network, path, Path(f"evaluation-{name}-{weights}"), known)
    raise UserError(
        f"{path} is neither a run directory nor a .keras file nor an exported model "
        "(saved_models/NAME) nor MODEL:WEIGHTS."
    )


def _of_keras(model, path: Path, output: Path, data: Data | None) -> Subject:
    import keras

    from ..directory import models

    if len(model.input_shape) != 4:
        raise UserError(
            f"{path} does not take images: its input has shape {model.input_shape[1:]}."
        )
    logits = getattr(model, "logits", None)
    if logits is not None:
        model = keras.Model(model.input, logits)
    return Subject(
        path=path,
        output=output,
        outputs=model.output_shape[-1],
        size=model.input_shape[2],
        logits=lambda images: np.asarray(model.predict_on_batch(images)),
        precision=models.precision(model),
        data=data,
    )


def _open_saved_model(path: Path) -> Subject:
    import tensorflow as tf

    from keras_preact.export.version import find

    version = find(path)
    with version.reading_card() as card:
        classes, precision, described = list(card["classes"]), card["precision"], card["run"] or {}
    with reading(f"{version.path} is damaged"):
        # kept alive by the closure: a signature alone does not hold its weights
        loaded = tf.saved_model.load(str(version.path))

    def logits(images: np.ndarray) -> np.ndarray:
        serve = loaded.signatures["serving_default"]
        return serve(images=tf.constant(images, tf.float32))["logits"].numpy()

    options = described.get("config")
    _, inputs = loaded.signatures["serving_default"].structured_input_signature
    return Subject(
        path=version.path,
        output=Path(f"evaluation-{path.name}"),
        outputs=len(classes),
        size=inputs["images"].shape[1],
        logits=logits,
        precision=precision,
        data=from_json(Data, options["data"]) if options else None,
        classes=classes,
        described=described if options else None,
    )


def _save_samples(images, folder: Path, count: int) -> int:
    """Write `count` test images as PNG files, the first of every class, then the second
    of every class, and so on. Return the number of files.
    """
    from PIL import Image

    disk.make(folder)
    first = images.test.open().take(max(20 * len(images.classes), count))
    seen: collections.Counter[int] = collections.Counter()
    ranked = []
    for image, label in first.as_numpy_iterator():
        ranked.append((seen[label], int(label), image))
        seen[label] += 1
    chosen = sorted(ranked, key=lambda entry: entry[:2])[:count]
    for rank, label, image in chosen:
        name = f"{rank}_{images.classes[label].replace('/', '-')}.png"
        with disk.replacing(folder / name) as temporary:
            Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(temporary)
    return len(chosen)


def main(argv: Sequence[str]) -> None:
    cli.main("evaluate", evaluate, argv)
