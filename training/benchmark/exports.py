"""Exported networks in the engines of the server: which engine and precision is how fast."""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from .. import children, disk
from ..errors import UserError, check_positive
from . import report, turns
from .report import Column

if TYPE_CHECKING:
    from .candidates import Candidate

Engine = Literal["plain", "tensorflow", "openvino"]
Precision = Literal["float32", "bfloat16", "int8"]

ABOUT = (
    "plain = the SavedModel as tf.saved_model.load returns it, called with its default signature; "
    "tensorflow and openvino = the engines of the server. CPU = CPU time of the process per image. "
    "A network that is given by its name has new weights: its answers mean nothing."
)
_ORDER = (
    "Every engine has one process for all rounds. They take turns, and a ratio compares figures of "
    "the same round and batch."
)
_COLUMNS = (
    Column("images_per_second", "images/s", digits=1),
    Column("cpu_seconds", "CPU ms", 1e3, 2),
)
#: Engines for an export, by its precision; all engines for others.
_ENGINES = {"other": ("plain",), "int8": ("openvino",)}


def run(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    engines: tuple[Engine, ...] = ("plain", "tensorflow", "openvino"),
    precisions: tuple[Precision, ...] = ("float32",),
    batches: tuple[int, ...] = (1, 8, 32),
    image_size: int | None = None,
    rounds: int = 5,
    seconds: float = 2.0,
    output: Path | None = None,
) -> None:
    """Measure exported networks in the engines of the server, without a server.

    Prints images per second and CPU time per image, with ratios to the first network in
    the first engine.

    Args:
        models: Folders of exported models, such as saved_models/cifar10_resnet20, or names
            of networks as in `keras-preact benchmark step`, which are exported with new
            weights. A network of another package is exported by Keras, in float32, and
            computed by plain alone.
        engines: plain calls the SavedModel as TensorFlow loads it; the others are the
            engines of `keras-preact serve`.
        precisions: Precisions to export a network in that is given by its name. int8 is
            for the engine openvino.
        batches: Images per call.
        image_size: Height and width of the images. If not given: the network's own.
        rounds: Number of rounds.
        seconds: Seconds of calls per round, engine and batch.
        output: Write settings, versions and every figure to this JSON file.
    """
    check_positive(image_size=image_size, rounds=rounds, seconds=seconds)
    for batch in batches:
        check_positive(batches=batch)
    if not (models and engines and precisions and batches):
        raise UserError("Give at least one model, and one of each of the options' values.")
    networks = [each for model in models for each in _networks(model, precisions, image_size)]
    rows = {
        f"{network.label}/{engine}": (network, engine)
        for network in networks
        for engine in engines
        if engine in _ENGINES.get(network.precision, (engine,))
    }
    if not rows:
        raise UserError(f"No engine computes any of the models. Received: {' '.join(engines)}")
    disk.make_place(output, "--output")
    started = report.now()
    with tempfile.TemporaryDirectory() as folder:
        used = {network.label: network for network, _ in rows.values()}
        paths = {
            label: network.version(image_size, Path(folder)) for label, network in used.items()
        }
        jobs = {
            label: {
                "version": str(paths[network.label]),
                "engine": engine,
                "size": image_size,
                "seconds": seconds,
                "batches": batches,
            }
            for label, (network, engine) in rows.items()
        }
        versions, answers = turns.measure("training.benchmark.engine", jobs, rounds)
    figures = [
        {
            f"{label}/batch={batch}": found
            for label, answer in of_round.items()
            for batch, found in answer.items()
        }
        for of_round in answers
    ]
    first = next(iter(rows))
    baselines = {
        f"{label}/batch={batch}": f"{first}/batch={batch}" for batch in batches for label in rows
    }
    content = {
        "command": "exports",
        "settings": {
            "models": models,
            "engines": engines,
            "precisions": precisions,
            "batches": batches,
            "image_size": image_size,
            "rounds": rounds,
            "seconds": seconds,
        },
        "about": ABOUT,
        "order": _ORDER,
        "started": started,
        "versions": versions,
        "rounds": figures,
        "summary": report.summarize(figures, baselines),
    }
    heading = f"Exported networks, {rounds} round{'s' * (rounds > 1)}"
    report.show(heading, _COLUMNS, baselines, content, output)


@dataclasses.dataclass(frozen=True)
class _Network:
    """A network in one precision, `other` for that of another package: the folder of a
    version, or what is to be exported.
    """

    label: str
    precision: str
    source: "Path | Candidate"

    def version(self, image_size: int | None, folder: Path) -> Path:
        """Return the folder of its version, which is in `folder` if it is exported now."""
        if isinstance(self.source, Path):
            return self.source
        job = {
            "name": self.source.name,
            "options": self.source.options,
            "image_size": image_size,
            "precision": self.precision,
            "folder": str(folder / self.label.replace("/", "-")),
        }
        module = "training.benchmark.exported"
        try:
            answer = children.result(module, json.dumps(job), "tensorflow", turns.PATIENCE)
        except RuntimeError as error:
            raise UserError(f"{self.label}: {error}") from error
        print(f"{self.label}: exported", file=sys.stderr, flush=True)
        return Path(answer["version"])


def _networks(model: str, precisions: tuple[str, ...], image_size: int | None) -> list[_Network]:
    from keras_preact.export.version import VersionError, find

    from . import candidates

    path = Path(model)
    if path.is_dir():
        try:
            version = find(path)
            with version.reading_card() as card:
                precision = card["precision"]
                [_, height, *_] = card["signatures"]["serving_default"]["inputs"]["images"]["shape"]
        except VersionError as error:
            raise UserError(str(error)) from error
        if None not in (height, image_size) and height != image_size:
            raise UserError(
                f"--image-size is for exports that take images of any size. {model} takes images "
                f"with {height} rows. Received: {image_size}"
            )
        return [_Network(f"{path.resolve().name}/{precision}", precision, version.path)]
    if "/" in model:
        raise UserError(f"{model} is no folder.")
    [candidate] = candidates.expand([model], ["tensorflow"])
    if candidate.options.keys() & candidates.SETTINGS.keys():
        raise UserError(f"Precisions are set by --precisions. Received: {model!r}")
    if candidate.name in candidates.PEERS:
        return [_Network(model, "other", candidate)]
    return [_Network(f"{model}/{precision}", precision, candidate) for precision in precisions]
