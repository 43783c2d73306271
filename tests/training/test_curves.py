"""The pictures of learning curves hold the numbers of the histories, for one epoch and
for many, for one run and several.
"""

from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
from PIL import Image

from keras_preact.analysis.figures import style as _style
from tests import layout
from training import curves, histories
from training.cli import UserError

NAMES = ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate")


def rows(epochs: int, names=NAMES, seed: int = 0) -> list[dict[str, float]]:
    """Make up a history."""
    rng = np.random.default_rng(seed)
    found = []
    for epoch in range(epochs):
        falling = 0.1 + 0.8 * np.exp(-4 * epoch / epochs)
        values = (
            3 * falling,
            1 - 0.8 * falling,
            4 * falling,
            1 - falling * rng.uniform(0.8, 1),
            0.1 * (epochs - epoch) / epochs,
        )
        found.append(
            {"epoch": epoch}
            | {name: value for name, value in zip(NAMES, values, strict=True) if name in names}
        )
    return found


def columns(history: list[dict[str, float]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in history], "float64") for name in history[0]}


@pytest.fixture
def figure(monkeypatch):
    """Give a function that returns the figure that was saved last."""
    saved = []
    save = matplotlib.figure.Figure.savefig

    def savefig(figure, *arguments, **settings):
        saved.append(figure)
        return save(figure, *arguments, **settings)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", savefig)
    return lambda: saved[-1]


def draw(history: list[dict[str, float]], path: Path, title: str = "") -> None:
    curves.draw({title: columns(history) if history else {}}, path, title)


def drawn(axes) -> list[tuple[np.ndarray, np.ndarray, str, str]]:
    """Return points, style and colour of the lines that have points."""
    return [
        (*map(np.asarray, line.get_data()), line.get_linestyle(), line.get_color())
        for line in axes.lines
        if len(line.get_xdata())
    ]


def names(figure) -> set[str]:
    """Return the names of lines, at their ends or in a legend."""
    shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return set(shown + [text.get_text() for axes in figure.axes for text in axes.texts])


def colours(path: Path) -> set[str]:
    """Return the colours of a picture that some pixels have, as #RRGGBB."""
    with Image.open(path) as picture:
        counts = picture.convert("RGB").getcolors(1 << 24)
    return {"#{:02X}{:02X}{:02X}".format(*colour) for count, colour in counts if count >= 5}


@pytest.mark.parametrize("epochs", [1, 2, 300])
def test_one_run(epochs, tmp_path, figure):
    history = rows(epochs)
    draw(history, tmp_path / "curves.png", "digits")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1210, 616)
    assert {"#FFFFFF", _style.colour(0), _style.GREY.upper()} <= colours(tmp_path / "curves.png")
    loss, error, rate = figure().axes
    table = columns(history)
    expected = {
        loss: [("--", table["loss"]), ("-", table["val_loss"])],
        error: [("--", 100 - 100 * table["accuracy"]), ("-", 100 - 100 * table["val_accuracy"])],
        rate: [("-", table["learning_rate"])],
    }
    for axes, lines in expected.items():
        for (x, y, style, _), (wanted_style, values) in zip(drawn(axes), lines, strict=True):
            np.testing.assert_array_equal(x, np.arange(1, epochs + 1))
            np.testing.assert_allclose(y, values)
            assert style == wanted_style
        low, high = axes.get_xlim()
        assert low <= 1
        assert high >= epochs
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert 2 <= len(ticks) <= 12
        assert all(tick == int(tick) for tick in ticks)
    assert (
        error.get_title(loc="left")
        == f"Lowest validation error: {100 - 100 * table['val_accuracy'].max():.2f} %"
    )
    assert figure().get_suptitle() == "digits"
    assert loss.get_title(loc="left") == f"Last training loss: {table['loss'][-1]:.3g}"
    assert (loss.get_ylabel(), error.get_ylabel(), rate.get_ylabel()) == (
        "Loss",
        "Error (%)",
        "Learning rate",
    )
    assert names(figure()) == {"training", "validation"}
    layout.check(figure())


def test_steep_beginning_does_not_flatten_the_errors_of_a_long_run(tmp_path, figure):
    history = rows(200)
    for i, row in enumerate(history):
        row["accuracy"] = row["val_accuracy"] = 0.1 if i < 10 or i == 100 else 0.9 - i / 4000
    draw(history, tmp_path / "curves.png", "")
    # all but the first ones and the peak are 10 to 15 %
    assert 15 < figure().axes[1].get_ylim()[1] < 20
    draw(history[:12], tmp_path / "curves.png", "")
    assert figure().axes[1].get_ylim()[1] > 90


def test_loss_over_decades_has_a_logarithmic_axis_with_plain_numbers(tmp_path, figure):
    history = rows(50)
    for i, row in enumerate(history):
        row["loss"], row["val_loss"] = 4 * 0.9**i, 4 * 0.95**i
    draw(history, tmp_path / "curves.png", "")
    loss = figure().axes[0]
    assert loss.get_yscale() == "log"
    figure().canvas.draw()
    low, high = loss.get_ylim()
    labels = [
        label.get_text()
        for label in loss.get_yticklabels()
        if low <= label.get_position()[1] <= high
    ]
    assert labels == ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]


class TestWhatIsNotThere:
    def test_columns(self, tmp_path, figure):
        """A history of an older run: no learning rate; and none of validation."""
        draw(rows(5, names=("loss", "accuracy")), tmp_path / "curves.png", "")
        loss, error = figure().axes
        assert len(drawn(loss)) == len(drawn(error)) == 1
        assert error.get_title(loc="left").startswith("Last training error: ")

    def test_accuracy(self, tmp_path, figure):
        draw(rows(5, names=("loss",)), tmp_path / "curves.png", "")
        loss, error = figure().axes
        assert (len(drawn(loss)), len(drawn(error))) == (1, 0)

    def test_cells(self, tmp_path, figure):
        """What Keras' CSVLogger wrote without validation, and epochs that were not
        validated.
        """
        file = tmp_path / "history.csv"
        file.write_text(
            "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.5,2.0,NA,NA\n1,0.75,1.0,,\n2,0.8,nan,0.7,1.5\n3,0.8,inf,0.6,1\n"
        )
        curves.draw({"": histories.read(file)}, tmp_path / "curves.png", "")
        loss, error = figure().axes
        assert drawn(loss)[1][1].tolist()[2:] == [1.5, 1.0]
        np.testing.assert_allclose(drawn(error)[1][1], [np.nan, np.nan, 30, 40])
        assert error.get_title(loc="left") == "Lowest validation error: 30.00 %"

    @pytest.mark.parametrize("history", [[], [{"epoch": 0, "loss": np.nan}]], ids=["empty", "nan"])
    def test_epochs(self, history, tmp_path):
        with pytest.raises(UserError, match="digits has no history yet"):
            draw(history, tmp_path / "curves.png", "digits")
        assert not list(tmp_path.iterdir())


def test_several_runs_have_a_colour_each(tmp_path, figure):
    histories = {f"run {i}": columns(rows(40 + i, seed=i)) for i in range(3)} | {
        "plain": columns(rows(30, ("loss",)))
    }
    curves.draw(histories, tmp_path / "curves.png", "", "test")
    loss, error, rate = figure().axes
    lines = drawn(loss)
    assert [style for *_, style, _ in lines] == ["--", "-", "--", "-", "--", "-", "--"]
    assert [colour for *_, colour in lines] == [_style.colour(i) for i in (0, 0, 1, 1, 2, 2, 3)]
    assert [len(x) for x, *_ in lines] == [40, 40, 41, 41, 42, 42, 30]
    assert (len(drawn(error)), len(drawn(rate))) == (6, 3)
    assert {_style.colour(i) for i in range(3)} <= colours(tmp_path / "curves.png")
    assert names(figure()) == set(histories)
    assert loss.get_ylabel() == "Loss (dashed: training, solid: test)"
    layout.check(figure())
    # the lowest one would be chosen on the test images
    last = [100 - 100 * history["val_accuracy"][-1] for history in list(histories.values())[:3]]
    assert error.get_title(loc="left") == f"Last test error: {min(last):.2f} to {max(last):.2f} %"


def test_runs_of_one_length_have_their_names_at_their_ends(tmp_path, figure):
    histories = {f"run {i}": columns(rows(40)) for i in range(3)}
    for i, history in enumerate(histories.values()):
        history["val_loss"] *= i + 1
    curves.draw(histories, tmp_path / "curves.png", "Three runs", "test")
    assert not figure().legends
    assert names(figure()) == set(histories)
    layout.check(figure())


class TestRead:
    def test_no_file(self, tmp_path):
        assert histories.read(tmp_path / "history.csv") == {}

    @pytest.mark.parametrize(
        "content",
        [
            b"\xff\xfe\x00",
            b"loss,accuracy\n1,2,3\n",
            b"PK\x03\x04\n\x00\x01\n",
            b"epoch,accuracy\n0,0.5\n",
        ],
        ids=["no text", "more cells than columns", "other format", "no loss"],
    )
    def test_file_that_is_no_history(self, content, tmp_path):
        file = tmp_path / "history.csv"
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"history\.csv is damaged"):
            histories.read(file)
