"""Runs of random options on random folders of images: each is trained, resumed, measured,
exported and served, and every way to ask gives the same answer.

The other tests combine the features that somebody thought of together. A seed that fails
here shows two that nobody did. It prints its folder and its options.
"""

import base64
import contextlib
import io
import json
import random
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.keras_preact.serving.server_process import run_server
from tests.training import calls
from tests.training.run.test_resume import assert_same, back_to
from training.commands import export, train
from training.commands.evaluate import __main__ as evaluate
from training.commands.predict import __main__ as predict

pytestmark = pytest.mark.soak

SEEDS = 20
#: The modes of the images of a folder, and the kinds of files that hold them.
MODES = [["RGB"], ["L"], ["RGB", "L"], ["RGB", "RGBA", "P", "L", "LA"], ["1", "L"], ["I;16", "L"]]
KINDS = {
    "RGB": ["png", "jpg", "webp", "gif"],
    "L": ["png", "jpg"],
    "RGBA": ["png", "webp"],
    "P": ["png", "gif"],
    "LA": ["png"],
    "1": ["png"],
    "I;16": ["png"],
}
NAMES = [["a b", "ü", "c'c", "d,d", 'e"e'], ["1", "10", "2", "x", "y"]]
PARTS = {"one folder": [""], "two parts": ["train", "test"], "three": ["train", "val", "test"]}
#: Options, and the share of the runs that have one of them.
OPTIONS = [
    (0.3, ["--data.flip none"]),
    (0.3, ["--data.rand-augment 2 9"]),
    (0.4, ["--data.mixup 0.2", "--data.cutmix 1", "--data.class-weights balanced"]),
    (0.2, ["--data.skip-broken"]),
    (0.3, ["--optimizer.ema 0.8"]),
    (0.2, ["--optimizer.label-smoothing 0.1"]),
    (0.3, ["--accumulate 2"]),
    (0.3, ["--optimizer.name muon", "--optimizer.name adamw", "--optimizer.name lion"]),
    (0.4, ["--precision mixed_bfloat16", "--precision mixed_float16"]),
    (0.3, [f"--model.normalization {name}" for name in ("layer", "group", "rms")]),
    (0.2, ["--model.stacked"]),
    (0.2, ["--model.dropout 0.1", "--model.stochastic-depth 0.2"]),
    (0.2, ["--model.options use_bias=true", "--model.options zero_init_last=true"]),
    (0.2, ["--steps-per-execution 2"]),
]
TRAINED = calls.words(
    "folder --model.name digits_resnet8_preact --model.width-factor 0.5 --schedule.unit iterations",
    "--schedule.length 6 --schedule.warmup 0 --health 1 --checkpoint.every 2 --checkpoint.keep 99",
)


class Drawn:
    """A folder of images in `folder`, and the options of a run on it."""

    def __init__(self, seed, folder):
        self.choose, self.folder = random.Random(seed), folder
        self.numpy = np.random.default_rng(seed)
        choose = self.choose.choice
        self.modes, self.layout = choose(MODES), choose(list(PARTS))
        self.size = (choose([8, 16, 20]), choose([8, 16, 24])) if choose([True, False]) else None
        self.names = choose(NAMES)[: choose([2, 3, 5])]
        for part in PARTS[self.layout]:
            for label, name in enumerate(self.names):
                place = folder / part / name
                place.mkdir(parents=True)
                for i in range(self.choose.randint(6, 12)):
                    mode = choose(self.modes)
                    self.image(label, mode).save(place / f"{i}.{choose(KINDS[mode])}")
        self.options = self.of_the_data()
        for share, values in OPTIONS:
            if self.choose.random() < share:
                self.options += choose(values).split()
        if "--precision" not in self.options:
            self.options += ["--precision", "float32"]

    def __str__(self):
        return f"{self.layout}, {self.size}, {self.modes}, {self.names}: {' '.join(self.options)}"

    def image(self, label, mode):
        """Return a blurred image of a mode, with more of one colour for each class."""
        width, height = self.size or (self.choose.randint(8, 40), self.choose.randint(8, 40))
        few = self.numpy.integers(0, 200, (height // 4 + 1, width // 4 + 1, 3), dtype="uint8")
        few[..., label % 3] += 55
        image = Image.fromarray(few).resize((width, height), Image.Resampling.BILINEAR)
        if mode == "I;16":
            return Image.fromarray(np.array(image.convert("L")).astype("uint16") * 257)
        return image.convert(mode)

    def of_the_data(self):
        """Return how the images are split, resized and changed at random."""
        choose, square = self.choose.choice, self.size and self.size[0] == self.size[1]
        found = ["--batch", choose("46")]
        if self.layout == "one folder":
            found += ["--data.test", choose(["0.2", "0.3"])]
        if self.layout != "three":
            found += ["--data.holdout", choose(["0", "0.1", "3"])]
        if not square or choose([True, False]):
            found += ["--data.size", choose(["8", "12", "16", "24"])]
        kinds = ["none", "pad_crop_flip", "resized_crop_flip"]
        return [*found, "--data.augmentation", choose(kinds)]


def printed_by(main, *arguments):
    """Return what a command prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(map(str, arguments)))
    return out.getvalue()


def served(paths, folder):
    """Return the probabilities that a server of folder/models gives for files, by class."""
    found = []
    with run_server(folder / "models", folder / "log") as server:
        for path in paths:
            file = base64.b64encode(path.read_bytes()).decode()
            with contextlib.closing(server.connect()) as connection:
                body = json.dumps({"examples": [{"image_bytes": {"b64": file}}]})
                connection.request("POST", "/v1/models/m:classify", body)
                answer = connection.getresponse()
                text = answer.read()
            assert answer.status == 200, text
            [scores] = json.loads(text)["results"]
            found.append(dict(scores))
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_step(seed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = Drawn(seed, tmp_path / "photos")
    print(drawn)
    data = ["--data.dir", drawn.folder]
    train.main(list(map(str, [*TRAINED, *drawn.options, *data, "--output", "run"])))

    shutil.copytree("run", "resumed")
    back_to(tmp_path / "resumed", drawn.choose.choice([2, 4, 6]))
    train.main(["--resume", "resumed"])
    assert_same(tmp_path / "resumed", tmp_path / "run")

    written = ["--save-errors", "3", "--json"]
    measured = json.loads(printed_by(evaluate.main, "run", *written))
    export.main(["run", "--name", "m", "--output", "models"])
    into = ["--data", "folder", *data, "--output", "again", *written]
    again = json.loads(printed_by(evaluate.main, "models/m", *into))
    rows, others = (calls.csv_rows(f"{folder}/predictions.csv") for folder in ("run", "again"))
    assert [row["image"] for row in rows] == [row["image"] for row in others]
    paths = [drawn.folder / row["image"] for row in rows]
    asked = json.loads(printed_by(predict.main, "models/m", *paths, "--json", "--top", "9"))

    half = "float32" not in drawn.options
    rounding = 0.03 if half else 2e-3
    if not half:
        for figure in ("accuracy", "loss"):
            assert measured[figure] == pytest.approx(again[figure], rel=1e-3, abs=1e-3)
    answers = [
        {each["class"]: each["probability"] for each in answer["predictions"]} for answer in asked
    ]
    for row, other, scores in zip(rows, others, answers, strict=True):
        near = pytest.approx(float(row["probability"]), abs=rounding)
        assert float(other["probability"]) == near
        assert scores[row["prediction"]] == near
    if seed % 4 == 0:  # a server starts in seconds
        for scores, wanted in zip(served(paths, tmp_path), answers, strict=True):
            assert scores == pytest.approx({name: wanted[name] for name in scores}, abs=rounding)
