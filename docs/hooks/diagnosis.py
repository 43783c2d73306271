"""The broken runs of docs/diagnosis.md and their repairs: `python docs/hooks/diagnosis.py`.

It trains them and writes diagnosis.json. From this file, `make pages` fills in the page and
draws its figures. The page shows the source of the functions in `SHOWN`.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[2]))  # so that the command finds the library

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_preact as kp
from training.cli.terminal import markdown

FILE = Path(__file__).with_suffix(".json")
#: What the functions of `SHOWN` need.
IMPORTS = """\
import keras
from sklearn.datasets import load_digits
import keras_preact as kp
"""
#: Seed of every run.
SEED = 0
#: Columns of a history that the file keeps.
COLUMNS = ("loss", "accuracy", "val_accuracy")


def digits():
    """Return the pixels of 1,797 digits, from 0 to 255, and their classes."""
    data = load_digits()
    return data.images[..., None].astype("float32") * (255 / 16), data.target


def normalized(pixels):
    """Return images of mean 0 and standard deviation 1."""
    return (pixels - pixels.mean()) / pixels.std()


def network(depth, activated=False, momentum=0.9, width=8):
    """Pre-activation units in plain Keras. With `activated`, the shortcut takes BN-ReLU(x)."""
    layers = keras.layers

    def norm_relu(x):
        return layers.ReLU()(layers.BatchNormalization(momentum=momentum)(x))

    def conv(x):
        return layers.Conv2D(width, 3, padding="same", use_bias=False)(x)

    inputs = keras.Input((8, 8, 1))
    x = conv(inputs)
    for _ in range((depth - 2) // 2):
        y = norm_relu(x)
        x = layers.Add()([y if activated else x, conv(norm_relu(conv(y)))])
    x = layers.GlobalAveragePooling2D()(norm_relu(x))
    return keras.Model(inputs, layers.Dense(10)(x), name="own")


def train(model, images, labels, rate=0.1, epochs=4, from_logits=True, callbacks=()):
    """Train on 1,437 digits, and test on the other 360 after each epoch."""
    model.compile(
        kp.optimizers.CoupledSGD(rate, momentum=0.9, coupled_weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits),
        metrics=["accuracy"],
    )
    return model.fit(
        images[:1437],
        labels[:1437],
        batch_size=64,
        epochs=epochs,
        validation_data=(images[1437:], labels[1437:]),
        callbacks=list(callbacks),
        verbose=2,
    )


SHOWN = (digits, normalized, network, train)


@dataclasses.dataclass
class Run:
    """What a run printed and reached.

    Args:
        log: Lines of `fit`, without times.
        messages: What `kp.TrainingHealth` reported.
        history: Column to one value per epoch.
        at_inference: Accuracy of the training images, as `evaluate` measures it in the end.
    """

    log: str
    messages: list[str]
    history: dict[str, list[float]]
    at_inference: float


def run(
    build: Callable[[], keras.Model], images, labels, interval=5, **options
) -> tuple[Run, keras.Model]:
    """Build a network with `SEED` and train it, watched by `kp.TrainingHealth`."""
    keras.utils.set_random_seed(SEED)
    messages: list[str] = []
    health = kp.TrainingHealth(
        interval, sample=images[:64], stop_on_divergence=True, report=messages.append
    )
    model = build()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        history = train(model, images, labels, callbacks=[health], **options).history
    accuracy = model.evaluate(images[:1437], labels[:1437], verbose=0)[1]
    columns = {name: [round(float(x), 4) for x in history[name]] for name in COLUMNS}
    log = re.sub(r"\d+/\d+ - .*?step - ", "", out.getvalue()).strip()
    return Run(log, messages, columns, round(float(accuracy), 4)), model


def audited(model, images, labels) -> kp.analysis.Audit:
    return kp.analysis.audit(model, images[:32], labels=labels[:32])


def resnet(depth=56, **options) -> keras.Model:
    return kp.models.resnet_cifar(depth, width_factor=0.5, input_shape=(8, 8, 1), **options)


def _falling(epochs: int) -> keras.optimizers.schedules.LearningRateSchedule:
    """Return a rate that reaches 0 at the end of a run."""
    return kp.schedules.cosine_schedule(0.1, steps=23 * epochs)


def flat(pixels, labels, depth=110, epochs=4) -> dict:
    """A factor of 0.5 on every shortcut."""
    images = normalized(pixels)
    scaled = functools.partial(resnet, depth, shortcut="constant_scaling")
    runs = {
        "x0.5 on the shortcuts": run(scaled, images, labels, epochs=epochs)[0],
        "x0.5, learning rate 0.005": run(scaled, images, labels, rate=0.005, epochs=epochs)[0],
        "identity shortcuts": run(lambda: resnet(depth), images, labels, epochs=epochs)[0],
    }
    return {"runs": runs, "audit": audited(scaled(), images, labels)}


def logits(pixels, labels, epochs=8) -> dict:
    """Logits in a loss that expects probabilities."""
    images = normalized(pixels)
    options = {"rate": _falling(epochs), "epochs": epochs}
    wrong, right = (
        run(functools.partial(network, 8), images, labels, from_logits=from_logits, **options)
        for from_logits in (False, True)
    )
    return {
        "runs": {"`from_logits=False`": wrong[0], "`from_logits=True`": right[0]},
        "audit": audited(wrong[1], images, labels),
    }


def stale(pixels, labels, epochs=8) -> dict:
    """Moving statistics that are slower than the training."""
    images = normalized(pixels)
    slow, fast = (
        run(functools.partial(network, 8, momentum=momentum), images, labels, epochs=epochs)
        for momentum in (0.999, 0.9)
    )
    return {
        "runs": {"momentum 0.999": slow[0], "momentum 0.9": fast[0]},
        "audit": audited(slow[1], images, labels),
    }


def nan(pixels, labels, depth=110, epochs=4) -> dict:
    """Branches without normalisation."""
    images = normalized(pixels)
    builds: dict[str, Callable] = {
        "no normalisation": functools.partial(resnet, depth, normalization="none"),
        "batch normalisation": functools.partial(resnet, depth),
        "no normalisation, `kp.models.FIXUP`": functools.partial(resnet, depth, **kp.models.FIXUP),
    }
    runs = {
        name: run(build, images, labels, interval=1, epochs=epochs)[0]
        for name, build in builds.items()
    }
    [(_, broken), *_] = builds.items()
    return {"runs": runs, "audit": audited(broken(), images, labels)}


def scale(pixels, labels, epochs=8) -> dict:
    """The same trained network, and three programs that send it images."""
    keras.utils.set_random_seed(SEED)
    model = kp.create_model("digits_resnet8_preact", include_preprocessing=True)
    with contextlib.redirect_stdout(io.StringIO()):
        train(model, pixels, labels, epochs=epochs)
    test, classes = pixels[1437:], labels[1437:]
    programs = {
        "pixels from 0 to 1": test / 255,
        "preprocessed twice": normalized(test),
        "pixels from 0 to 255": test,
    }
    accuracies, warned, findings = {}, {}, {}
    for name, images in programs.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logits = model.predict(images, verbose=0)
        accuracies[name] = round(float(np.mean(logits.argmax(axis=1) == classes)), 4)
        warned[name] = [str(each.message) for each in caught if each.category is UserWarning]
        findings[name] = audited(model, images, classes)["sample scale"]
    return {"accuracies": accuracies, "warnings": warned, "findings": findings}


def depth(pixels, labels, depths=(8, 56), epochs=8) -> dict:
    """The shortcut takes the activated x."""
    images = normalized(pixels)
    rate = _falling(epochs)
    runs = {
        f"{shortcut} on the shortcut, {layers} layers": run(
            functools.partial(network, layers, shortcut == "BN-ReLU(x)"),
            images,
            labels,
            rate=rate,
            epochs=epochs,
        )[0]
        for shortcut in ("BN-ReLU(x)", "x")
        for layers in depths
    }
    return {"runs": runs, "audit": audited(network(depths[-1], activated=True), images, labels)}


CASES: Mapping[str, Callable[..., dict]] = {
    each.__name__: each for each in (flat, logits, stale, nan, scale, depth)
}


def serialized(value):
    """Return what JSON holds of a result."""
    if isinstance(value, kp.analysis.Audit):
        return str(value)
    if isinstance(value, kp.analysis.AuditFinding):
        return f"{value.status}  {value.check}: {value.detail}"
    return dataclasses.asdict(value)


@functools.cache
def measured() -> dict:
    """Return the content of the file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def _text(words: str) -> str:
    return f"```text\n{words}\n```"


def diagnosis_code() -> str:
    """Return the source of the functions of the page in Markdown."""
    return f"```python\n{IMPORTS}\n\n" + "\n\n".join(map(inspect.getsource, SHOWN)) + "```"


def diagnosis(case: str, part: str, name: str = "0", last: str = "0") -> str:
    """Return a part of a case in Markdown.

    Args:
        case: A key of `CASES`.
        part: `log` or `messages` of a run, `audit`, `warning`, or `table`, the runs side by
            side.
        name: Number of the run.
        last: Show this number of the last epochs of a log; 0: all.
    """
    found = measured()[case]
    if part == "audit":
        return _text(found["audit"])
    if part == "warning":
        name = list(found["warnings"])[int(name)]
        lines = (*found["warnings"][name], found["findings"][name])
        return _text("\n\n".join(textwrap.fill(line, 110) for line in lines))
    if part == "table":
        if "accuracies" in found:
            rows = [[key, f"{100 * value:.1f} %"] for key, value in found["accuracies"].items()]
            return markdown([["the other program sends", "test accuracy"], *rows])
        head = ["run", "training loss", "accuracy in training", "of the same images in `evaluate`"]
        head += ["test accuracy"]
        rows = [[key, *_reached(each)] for key, each in found["runs"].items()]
        return markdown([head, *rows])
    each = list(found["runs"].values())[int(name)]
    if part == "log":
        return _text("\n".join(each["log"].splitlines()[-2 * int(last) :]))
    return _text("\n".join(line for text in each["messages"] for line in textwrap.wrap(text, 110)))


def _reached(found: Mapping[str, Any]) -> list[str]:
    """Return the values after the last epoch of a run in words."""
    loss, accuracy, of_test = (found["history"][name][-1] for name in COLUMNS)
    shares = (accuracy, found["at_inference"], of_test)
    return [f"{loss:.2f}", *(f"{100 * share:.1f} %" for share in shares)]


def figures() -> Iterator[tuple[str, Any]]:
    """Yield names and figures of the cases whose runs are drawn."""
    from keras_preact.analysis.figures import training_curves

    for case in ("flat", "logits", "stale", "depth"):
        runs = measured()[case]["runs"]
        histories = {name: each["history"] for name, each in runs.items()}
        yield f"diagnosis_{case}", training_curves(histories)


def main(names: Sequence[str]) -> None:
    """Measure cases, all without names, and write the file."""
    content = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for name in names or CASES:
        content[name] = CASES[name](*digits())
        text = json.dumps(content, indent=1, default=serialized, ensure_ascii=False)
        FILE.write_text(text + "\n", encoding="utf-8")
        content = json.loads(text)
        print(f"Written: {FILE}, {name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
