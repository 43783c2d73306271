"""Draws the pictures when the site is built: unit diagrams from the tables, signals from networks at their start.

Those of the report on the reproduction are there already, and are taken over.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib
from mkdocs.structure.files import File
from sklearn.datasets import load_digits

import keras_preact as kp
from keras_preact.analysis import figures

#: Blocks that are drawn, in the arrangement that shows them.
BLOCKS = {"basic": "full_preactivation", "bottleneck": "full_preactivation", "dense": "full_preactivation"}
BLOCKS |= {"single": "full_preactivation", "attention": "pre_norm", "mlp": "pre_norm", "swiglu": "pre_norm"}
COMPARED = ("original", "full_preactivation")


def diagrams() -> Iterator[tuple[str, object]]:
    """Yield names and figures of every arrangement, shortcut and block."""
    yield "arrangements", figures.arrangements_figure()
    yield "arrangements_bottleneck", figures.arrangements_figure("bottleneck")
    yield "shortcuts", figures.shortcuts_figure()
    for name in kp.ARRANGEMENTS:
        yield f"arrangement_{name}", figures.unit_diagram(name)
    for name in kp.SHORTCUTS:
        yield f"shortcut_{name}", figures.diagrams_figure({name: figures.diagram("original", name)})
    drawn = {
        block: figures.diagram(row, block=block, normalization="batch" if row in kp.ARRANGEMENTS else "layer")
        for block, row in BLOCKS.items()
    }
    yield "blocks", figures.diagrams_figure(drawn)
    transformer = {
        f"{row}, {block}": figures.diagram(row, block=block, normalization="layer")
        for row in kp.arrangements.TRANSFORMER_ARRANGEMENTS
        for block in ("attention", "mlp")
    }
    yield "transformers", figures.diagrams_figure(transformer)


def measurements() -> Iterator[tuple[str, object]]:
    """Yield figures of two networks at their start, on the handwritten digits."""
    digits = load_digits()
    images, labels = digits.images[:32, ..., None].astype("float32"), digits.target[:32]
    images = (images - images.mean()) / images.std()
    networks = {}
    for name in COMPARED:
        keras.utils.set_random_seed(0)
        networks[name] = kp.models.resnet_cifar(
            110, arrangement=name, width_factor=0.5, input_shape=(8, 8, 1), kernel_initializer=kp.initializers.released_he(0)
        )
    signals = {name: kp.analysis.propagation(model, images, labels) for name, model in networks.items()}
    yield "activation_norms", figures.activation_norms(signals)
    yield "truncation", figures.truncation(signals)
    yield (
        "direct_paths",
        figures.direct_paths({name: kp.analysis.direct_path(each, images) for name, each in networks.items()}),
    )
    yield (
        "gradient_split",
        figures.gradient_split(kp.analysis.check_identities(networks["full_preactivation"], images, labels)),
    )


def svg(figure) -> bytes:
    """Return a figure as SVG, the same bytes each time."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "keras-preact"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def on_files(files, config):
    for draw in (diagrams, measurements):
        for name, figure in draw():
            files.append(File.generated(config, f"figures/{name}.svg", content=svg(figure)))
    for path in sorted((Path(config.config_file_path).parent / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files
