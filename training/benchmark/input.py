"""The input of a training from a folder of photographs: how fast batches come."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro

from .. import disk
from ..errors import UserError, check_positive
from . import report, turns
from .report import Column

ABOUT = (
    "first = time from the folder to the first batch: to list the files, to check them and to fill "
    "the buffers. CPU = CPU time of the process per image. Training: a random part of each image, "
    "mirrored in half of the cases. Evaluation: the middle of each image."
)
_ORDER = (
    "Every loader has one process for all rounds. They take turns, and a ratio compares figures of "
    "the same round. Every loader has its own settings of threads and buffers."
)
_COLUMNS = (
    Column("images_per_second", "images/s", digits=0),
    Column("cpu_seconds", "CPU us", 1e6, 0),
    Column("first_seconds", "first s", digits=2),
)
#: Names of the loaders, those of `loaders.LOADERS`. The first one is the baseline.
LOADERS: tuple[Literal["keras", "grain", "keras-preact"], ...] = ("keras", "grain", "keras-preact")
#: Height and width of a photograph that is made, and how many differ.
_SHAPE, _DIFFERENT, _CLASSES = (375, 500), 64, 10


def run(
    folder: Annotated[Path | None, tyro.conf.Positional] = None,
    /,
    loaders: tuple[Literal["keras", "grain", "keras-preact"], ...] = LOADERS,
    modes: tuple[Literal["train", "evaluation"], ...] = ("train", "evaluation"),
    size: int = 224,
    batch: Annotated[int, tyro.conf.arg(aliases=["--batch-size"])] = 32,
    batches: int = 20,
    files: int = 6400,
    rounds: int = 5,
    output: Path | None = None,
) -> None:
    """Measure how fast batches come from a folder of photographs.

    Prints images per second, CPU time per image and the time to the first batch, with
    ratios to the first loader.

    Args:
        folder: Folder with a folder of images for each class. If not given: photographs
            of 500 x 375 pixels are made.
        loaders: What reads the images: `keras.utils.image_dataset_from_directory`, Grain
            with Pillow, or the commands of this package.
        modes: Batches for training, or for evaluation.
        size: Height and width of the images in a batch.
        batch: Images per batch.
        batches: Timed batches per round. As many are read before them.
        files: Number of files to make. They are links to 64 photographs.
        rounds: Number of rounds.
        output: Write settings, versions and every figure to this JSON file.
    """
    check_positive(size=size, batch=batch, batches=batches, rounds=rounds)
    if not loaders or not modes:
        raise UserError("Give at least one of --loaders and --modes.")
    disk.make_place(output, "--output")
    started = report.now()
    baselines = {f"{mode}/{loader}": f"{mode}/{loaders[0]}" for mode in modes for loader in loaders}
    with contextlib.ExitStack() as stack:
        if folder is None:
            if files < _CLASSES:
                raise UserError(f"--files must be at least {_CLASSES}. Received: {files}")
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            make_photographs(root, files)
        else:
            root = folder / "train" if (folder / "train").is_dir() else folder
            if not root.is_dir() or not any(each.is_dir() for each in root.iterdir()):
                raise UserError(f"{root} must be a folder with a folder of images for each class.")
        jobs = {}
        for label in baselines:
            mode, _, loader = label.partition("/")
            jobs[label] = {
                "loader": loader,
                "folder": str(root.absolute()),
                "mode": mode,
                "size": size,
                "batch": batch,
                "batches": batches,
            }
        versions, figures = turns.measure("training.benchmark.loaders", jobs, rounds)
    source = f"{files:,} photographs" if folder is None else str(folder)
    heading = (
        f"Input from {source}: batches of {batch} images of {size} x {size} pixels, {rounds} "
        f"round{'s' * (rounds > 1)}"
    )
    content = {
        "command": "input",
        "settings": {
            "folder": None if folder is None else folder.name,
            "loaders": loaders,
            "modes": modes,
            "size": size,
            "batch": batch,
            "batches": batches,
            "files": files if folder is None else None,
            "rounds": rounds,
        },
        "about": ABOUT,
        "order": _ORDER,
        "started": started,
        "versions": versions,
        "rounds": figures,
        "summary": report.summarize(figures, baselines),
    }
    report.show(heading, _COLUMNS, baselines, content, output)


def make_photographs(folder: Path, files: int) -> None:
    """Write a folder of classes with this number of JPEG files, which are links to 64
    different ones of about 50 KB.
    """
    from PIL import Image

    random = np.random.default_rng(0)
    originals = folder / ".originals"
    originals.mkdir()
    for number in range(min(_DIFFERENT, files)):
        # shapes of some size under fine grain
        shapes = Image.fromarray(random.integers(0, 256, (24, 32, 3), "uint8"))
        large = np.asarray(shapes.resize(_SHAPE[::-1], Image.Resampling.BICUBIC), "int16")
        pixels = (large + random.integers(-8, 9, large.shape)).clip(0, 255).astype("uint8")
        Image.fromarray(pixels).save(originals / f"{number}.jpg", quality=90)
    for number in range(files):
        place = folder / f"class{number % _CLASSES}"
        place.mkdir(exist_ok=True)
        os.link(originals / f"{number % _DIFFERENT}.jpg", place / f"{number:07d}.jpg")
