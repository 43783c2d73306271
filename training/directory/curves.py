"""Learning curves of runs as a picture: loss, error and learning rate by epoch."""

from collections.abc import Mapping
from pathlib import Path

from keras_preact.analysis import figures

from ..errors import UserError
from .histories import Columns, measured


def draw(
    histories: Mapping[str, Columns], path: Path, title: str, measured_on: str = "validation"
) -> None:
    """Draw the learning curves of runs into a PNG file, as `figures.training_curves` does.

    Raises:
        UserError: for a history without an epoch.
    """
    for label, columns in histories.items():
        if not measured(columns, "loss"):
            raise UserError(f"{label} has no history yet: there is no epoch with a loss to draw.")
    figures.training_curves(histories, measured_on, title).savefig(path, format="png", dpi=110)
