"""Exports the networks to be measured, in a process of its own.

JOB is JSON: the models, the precisions and the folder. The networks keep their initial
weights: the time does not depend on them.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import children
from ...cli import UserError
from .. import candidates
from .cells import PLAIN

#: Registered model to the same network of another package.
PEERS: Mapping[str, str] = {"imagenet_resnet50_preact": "keras_applications_resnet50v2"}
PEER_PRECISION = "float32"
#: Random images on which bfloat16 and int8 are compared with the model's own answers.
VALIDATION_IMAGES = 16


def path_of(folder: Path, model: str, precision: str) -> Path:
    """Return the path of an export, `folder/MODEL-PRECISION/MODEL/1`: a server can serve
    it alone.
    """
    return folder / f"{name_of(model)}-{precision}" / name_of(model) / "1"


def name_of(model: str) -> str:
    """Return the name under which a model is served."""
    return re.sub(r"\W", "_", model)


def plain_peer(model: str) -> list[tuple[str, str, str]]:
    """Return model, engine and precision of a model's peer; nothing if it has none."""
    return [(PEERS[model], PLAIN, PEER_PRECISION)] if model in PEERS else []


def write(models: Sequence[str], precisions: Sequence[str], folder: Path) -> None:
    """Export every model in every precision, and its peer, unless `folder` has it.

    Raises:
        UserError: if one could not be exported.
    """
    job = json.dumps({"models": models, "precisions": precisions, "folder": str(folder)})
    child = subprocess.run(
        children.command(f"{__package__}.exports", job),
        env=children.environment("tensorflow"),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if child.returncode:
        raise UserError(
            f"The exporting process ended with status {child.returncode}; its message stands above."
        )


def _write_all(models: Sequence[str], precisions: Sequence[str], folder: Path) -> None:
    for model in models:
        missing = [
            precision for precision in precisions if not path_of(folder, model, precision).is_dir()
        ]
        if missing:
            _write(model, missing, folder)
        peer = PEERS.get(model)
        if peer is not None and not path_of(folder, peer, PEER_PRECISION).is_dir():
            _write_peer(peer, path_of(folder, peer, PEER_PRECISION))


def _write(model: str, precisions: Sequence[str], folder: Path) -> None:
    import keras
    import numpy as np

    import keras_preact as kp

    keras.utils.set_random_seed(0)
    name, options = candidates.parse(model)
    network = kp.create_model(name, include_preprocessing=True, **options)
    shape = (VALIDATION_IMAGES, *network.input_shape[1:])
    images = np.random.default_rng(0).integers(0, 256, shape).astype("float32")
    labels = network.predict(images, verbose=0).argmax(axis=-1)
    for precision in precisions:
        kp.export.save(
            network,
            path_of(folder, model, precision).parent,
            classes=[f"class {i}" for i in range(network.output_shape[-1])],
            precision=precision,
            validation_data=(images, labels),
            calibration_images=images,
            # an untrained network's classes are too close together for a limit
            max_accuracy_loss=1.0,
        )


def _write_peer(peer: str, path: Path) -> None:
    """Export a network of another package as its users do."""
    unfinished = path.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    candidates.PEERS[peer].build(candidates.PEERS[peer].image_size).export(
        str(unfinished), verbose=False
    )
    unfinished.rename(path)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    _write_all(told["models"], told["precisions"], Path(told["folder"]))
