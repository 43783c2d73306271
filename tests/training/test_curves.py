"""The pictures of learning curves hold the numbers of the histories."""

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from training import curves, histories
from training.cli import UserError


def columns(epochs: int) -> dict[str, np.ndarray]:
    """Make up a history."""
    falling = 0.1 + 0.8 * np.exp(-4 * np.arange(epochs) / epochs)
    return {
        "epoch": np.arange(epochs, dtype="float64"),
        "loss": 3 * falling,
        "accuracy": 1 - 0.8 * falling,
        "val_loss": 4 * falling,
        "val_accuracy": 1 - falling,
        "learning_rate": 0.1 * falling,
    }


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """A function that draws histories and returns the points and the style of each axes'
    lines, and the axes.
    """

    def draw(*arguments):
        saved = []
        save = matplotlib.figure.Figure.savefig

        def savefig(figure, *names, **settings):
            saved.append(figure)
            save(figure, *names, **settings)

        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
        curves.draw(arguments[0], tmp_path / "curves.png", *arguments[1:])
        with Image.open(tmp_path / "curves.png") as picture:
            picture.verify()
        lines = [
            [
                (*line.get_data(), line.get_linestyle())
                for line in axes.lines
                if len(line.get_xdata())
            ]
            for axes in saved[-1].axes
        ]
        return lines, saved[-1].axes

    return draw


@pytest.mark.parametrize("epochs", [1, 300])
def test_one_run(epochs, draw):
    table = columns(epochs)
    lines, (_, error, _) = draw({"digits": table}, "digits")
    expected = [
        [("--", table["loss"]), ("-", table["val_loss"])],
        [("--", 100 - 100 * table["accuracy"]), ("-", 100 - 100 * table["val_accuracy"])],
        [("-", table["learning_rate"])],
    ]
    for found, wanted in zip(lines, expected, strict=True):
        for (x, y, style), (wanted_style, values) in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, np.arange(1, epochs + 1))
            np.testing.assert_allclose(y, values)
            assert style == wanted_style
    lowest = 100 - 100 * table["val_accuracy"].max()
    assert error.get_title(loc="left") == f"Lowest validation error: {lowest:.2f} %"


def test_several_runs(draw):
    """Those that differ in length; the lowest error would be chosen on the test images."""
    runs = {f"run {i}": columns(40 + i) for i in range(3)} | {"plain": {"loss": np.ones(30)}}
    lines, (_, error, _) = draw(runs, "", "test")
    assert [len(x) for x, *_ in lines[0]] == [40, 40, 41, 41, 42, 42, 30]
    assert [len(each) for each in lines[1:]] == [6, 3]
    last = [100 - 100 * runs[f"run {i}"]["val_accuracy"][-1] for i in range(3)]
    assert error.get_title(loc="left") == f"Last test error: {min(last):.2f} to {max(last):.2f} %"


def test_cells_that_are_missing(draw, tmp_path):
    """What Keras' CSVLogger wrote without validation, and epochs that were not validated."""
    file = tmp_path / "history.csv"
    lines = ("0,0.5,2.0,NA,NA", "1,0.75,1.0,,", "2,0.8,nan,0.7,1.5", "3,0.8,inf,0.6,1")
    file.write_text("\n".join(["epoch,accuracy,loss,val_accuracy,val_loss", *lines, ""]))
    (loss, error), _ = draw({"": histories.read(file)}, "")
    assert loss[1][1].tolist()[2:] == [1.5, 1.0]
    np.testing.assert_allclose(error[1][1], [np.nan, np.nan, 30, 40])


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
def test_file_that_is_no_history(content, tmp_path):
    file = tmp_path / "history.csv"
    assert histories.read(file) == {}  # no file
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"history\.csv is damaged"):
        histories.read(file)
