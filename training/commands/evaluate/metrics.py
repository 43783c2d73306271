"""The metrics of a classifier, and their words."""

from typing import Any

import numpy as np

from ...errors import UserError
from . import corruptions
from .views import VIEWS

#: Number of equal intervals of confidence in which it is compared with the accuracy.
CONFIDENCE_BINS = 15


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
    if "top5_accuracy" in metrics and len(metrics["per_class"]) > 10:  # of 10, 5 are half
        figures.append(f"top-5 accuracy {_percent(metrics['top5_accuracy'])}")
    lines = [
        f"{metrics['model']} on {metrics['images']:,} test images of {metrics['data']}"
        f"{VIEWS[metrics['views']]}:",
        f"  {', '.join(figures)}",
    ]
    if calibrated := metrics.get("calibrated"):
        lines.append(
            f"  with temperature {calibrated['temperature']:.3g}, fitted on "
            f"{calibrated['held_out_images']:,} held-out images: {_calibration(calibrated)}"
        )
    lines.append(f"  {'class':<{width}}  precision     recall         f1  images")
    for name, row in metrics["per_class"].items():
        scores = [_percent(row[score]) for score in ("precision", "recall", "f1")]
        if not row["images"]:
            scores = ["-", "-", "-"]
        cells = "  ".join(f"{score:>9}" for score in scores)
        lines.append(f"  {name:<{width}}  {cells}  {row['images']:6d}")
    if errors := metrics.get("corruptions"):
        lines.append(corruptions.report(errors))
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _calibration(figures: dict) -> str:
    error = _percent(figures["calibration_error"])
    return f"loss {figures['loss']:.4f}, calibration error {error}"
