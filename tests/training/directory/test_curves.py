"""Histories of runs are read and drawn, or an error names the problem."""

import numpy as np
import pytest
from PIL import Image

from training.directory import curves, histories
from training.errors import UserError


def test_cells_that_are_missing(tmp_path):
    """Files of Keras' CSVLogger without validation, and epochs that were not validated."""
    file = tmp_path / "history.csv"
    lines = ("0,0.5,2.0,NA,NA", "1,0.75,1.0,,", "2,0.8,nan,0.7,1.5", "3,0.8,inf,0.6,1")
    file.write_text("\n".join(["epoch,accuracy,loss,val_accuracy,val_loss", *lines, ""]))
    history = histories.read(file)
    np.testing.assert_array_equal(history["val_loss"], [np.nan, np.nan, 1.5, 1])
    curves.draw({"": history}, tmp_path / "curves.png", "digits")
    with Image.open(tmp_path / "curves.png") as picture:
        picture.verify()


def test_no_epoch(tmp_path):
    for history in ({}, {"epoch": np.zeros(1), "loss": np.array([np.nan])}):
        with pytest.raises(UserError, match="digits has no history yet"):
            curves.draw({"digits": history}, tmp_path / "curves.png", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"loss,accuracy\n1,2,3\n", b"PK\x03\x04\n\x00\x01\n", b"epoch\n0\n"],
    ids=["no text", "more cells than columns", "other format", "no loss"],
)
def test_file_that_is_not_a_history(content, tmp_path):
    file = tmp_path / "history.csv"
    assert histories.read(file) == {}  # no file
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"history\.csv is damaged"):
        histories.read(file)
