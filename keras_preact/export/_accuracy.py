"""What an export in fewer bits loses, in images that are right."""

import dataclasses
from pathlib import Path

import numpy as np

from keras_preact.export import _check
from keras_preact.export._children import ExportError
from keras_preact.export._scores import Scores

#: Images that a process runs at a time.
BATCH = 32


@dataclasses.dataclass(frozen=True)
class Reference:
    """Labelled images and how many of them a model gets right.

    Args:
        images: As the exported network takes them: float32, channels last.
        labels: `(n,)`.
        accuracy: The share that the model gets right.
        max_loss: By which that of the export may be lower.
    """

    images: np.ndarray
    labels: np.ndarray
    accuracy: float
    max_loss: float

    @classmethod
    def of(cls, scores: Scores, data: tuple | None, max_loss: float) -> "Reference":
        """Measure a classifier on `data`, its images and labels.

        Raises:
            ValueError: if there are none, or their numbers differ.
        """
        if data is None:
            raise ValueError(
                "precision='bfloat16' needs validation_data=(images, labels), on which its "
                "accuracy is compared with the model's. Received: validation_data=None"
            )
        images, labels = (np.asarray(part) for part in data)
        if len(images) != len(labels) or not len(images) or labels.ndim != 1:
            raise ValueError(
                "`validation_data` must be images and as many labels, numbers of classes. "
                f"Received: shapes {images.shape} and {labels.shape}"
            )
        images = images.astype("float32")
        outputs = scores.probe.predict(images, batch_size=BATCH, verbose=0)[0]
        if scores.channels_first:
            images = np.moveaxis(images, 1, -1)
        return cls(images, labels, float((outputs.argmax(axis=-1) == labels).mean()), max_loss)

    def compare(self, saved_model: Path, folder: Path) -> dict:
        """Run a SavedModel on the images and compare; files are written to `folder`.

        Returns:
            Both accuracies and the number of images, for the model card.

        Raises:
            ExportError: if it loses more than it may.
        """
        parts = range(0, len(self.images), BATCH)
        outputs = _check.replay(
            saved_model, {str(i): self.images[i : i + BATCH] for i in parts}, folder
        )
        predicted = np.concatenate([outputs[f"{i}/logits"].argmax(axis=-1) for i in parts])
        accuracy = float((predicted == self.labels).mean())
        if accuracy < self.accuracy - self.max_loss:
            raise ExportError(
                f"Of {len(self.labels)} images {100 * accuracy:.2f} % are right in bfloat16, "
                f"{100 * self.accuracy:.2f} % by the model itself: "
                f"max_accuracy_loss={self.max_loss} allows less. Export it with "
                "precision='float32'."
            )
        return {
            "images": len(self.labels),
            "model": self.accuracy,
            "bfloat16": accuracy,
            "max_loss": self.max_loss,
        }
