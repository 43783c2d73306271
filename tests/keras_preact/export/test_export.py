"""`kp.export.save`: what it writes, what TensorFlow makes of it, and what failures leave."""

import hashlib
import importlib.util
import json
import re
import types
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.classifiers import PROBABILITIES, Outputs
from keras_preact.export import (
    _check,
    _children,
    _directory,
    _flat,
    _scores,
    saved_model,
)
from keras_preact.export.version import INT8, Version
from tests.keras_preact import harness
from tests.keras_preact.export import image_files
from tests.keras_preact.export.networks import grouped, stacked_with_dropout, two_stages
from tests.keras_preact.export.one_process import in_this_process

tf = pytest.importorskip("tensorflow")

DIGITS = [f"digit {i}" for i in range(10)]
ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
#: What is not needed of the normalisations after convolutions.
FOLDED = re.compile(r"(stem_norm|branch/norm_[12])/(gamma|moving_mean|moving_variance)$")
CAST = keras.layers.Activation("linear", dtype="float32")
GRAYS = kp.preprocessing.Preprocessing((100, 0), (50, 1), 12)
SQUEEZED = kp.blocks.Basic(squeeze_excitation=4)
STANDARDIZED = kp.blocks.Basic(standardize_weights=True)
COLOURS = kp.preprocessing.Preprocessing(
    (100, 120, 140), (50, 60, 70), 12, resize=12, crop="center"
)


def sequential(*last):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="relu"), *last])


def tokens():
    """A classifier of six tokens, numbers below 20, that only its embedding takes for whole
    numbers.
    """
    layers = [keras.layers.Embedding(20, 4), keras.layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((6,)), keras.Sequential(layers), keras.layers.Dense(10)])


def of_fixed_batches():
    return keras.Sequential([keras.Input((6,), batch_size=8), keras.layers.Dense(2)])


#: Name to the model, the activation of its output, and how image files become its input.
MODELS = {
    "stacked": (lambda: stacked_with_dropout(8), "linear", None),
    "any size": (lambda: grouped(classifier_activation="softmax"), "softmax", COLOURS),
    "dense": (lambda: sequential(keras.layers.Dense(10, activation="sigmoid")), "sigmoid", None),
    "tokens": (tokens, "linear", None),
}


class Export:
    """A model of MODELS, its images and image files, and its export, loaded."""

    def __init__(self, name, folder):
        build, self.activation, self.preprocessing = MODELS[name]
        self.model = build()
        harness.randomize(self.model)
        self.input_shape = self.model.input_shape[1:]
        shape = (3, *(n or 12 for n in self.input_shape))
        self.pixels = np.random.default_rng(0).integers(0, 256, shape, dtype="uint8")
        self.takes_pixels = name == "stacked"
        self.images = self.pixels.astype("float32")
        self.takes_tokens = name == "tokens"
        if self.takes_tokens:
            self.images = (self.pixels % 20).astype("int32")
        elif not self.takes_pixels:
            self.images = (self.images - 120) / 60
        self.path = kp.export.save(
            self.model,
            folder / "m",
            classes=DIGITS,
            preprocessing=self.preprocessing,
            run={"recipe": "digits", "directory": Path("runs/1")},
            metrics={"error": np.float32(0.25)},
            top_k=3,
            batch_sizes=(1, 3),
            fold_batch_norm=self.preprocessing is None,
        )
        self.loaded = tf.saved_model.load(str(self.path))
        self.card = json.loads((self.path.parent / "model_card.json").read_text())

    def __call__(self, signature="serving_default", **inputs):
        inputs = {name: tf.constant(value) for name, value in inputs.items()}
        outputs = self.loaded.signatures[signature](**inputs)
        return {name: value.numpy() for name, value in outputs.items()}


#: What differs on other backends is the file handed over: one model shows it.
@pytest.fixture(scope="module", params=MODELS if ON_TENSORFLOW else ["stacked"])
def export(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_check, "replay", in_this_process)
        return Export(request.param, tmp_path_factory.mktemp("export"))


@pytest.mark.backend
def test_outputs_are_those_of_the_model(export):
    """The logits come from the served features."""
    own = export.model.predict(export.images, verbose=0)
    scores, features = export(images=export.images), export("features", images=export.images)
    kernel, bias = export.model.get_weights()[-2:]
    logits = features["features"] @ kernel + bias
    probabilities = PROBABILITIES[export.card["activation"]](logits)
    harness.close(scores["logits"], logits)
    harness.close(scores["probabilities"], probabilities)
    harness.close(own, logits if export.activation == "linear" else probabilities)


@pytest.mark.backend
def test_every_weight_once_and_operations_that_any_server_has(export):
    folded = export.preprocessing is None
    unread = [weight for weight in export.model.weights if folded and FOLDED.search(weight.path)]
    count = export.model.count_params() - sum(int(np.prod(weight.shape)) for weight in unread)
    assert sum(int(np.prod(weight.shape)) for weight in export.loaded.weights) == count
    variables = tf.train.list_variables(str(export.path / "variables/variables"))
    assert sum(int(np.prod(shape)) for name, shape in variables if "VARIABLE" in name) == count
    for name, serve in export.loaded.signatures.items():
        graph = serve.graph.as_graph_def()
        inner = graph.library.function
        found = {node.op for part in (graph.node, *(f.node_def for f in inner)) for node in part}
        found |= {key for function in inner for key in function.attr}
        unwanted = ["Assign", "Random", "Xla"]
        if name != "predict_bytes":  # files are decoded one by one
            unwanted += ["While", "TensorList"]
        assert not [op for op in found for word in unwanted if word in op]


def test_signatures(export):
    """Names, dtypes and shapes in the file are those in the card."""
    card, served = export.card["signatures"], export.loaded.signatures
    names = ["serving_default", "features", "predict_bytes"]
    assert [*card] == names[: 3 if len(export.input_shape) == 3 else 2]
    assert card.keys() == served.keys()
    for name, serve in served.items():
        inputs, outputs = serve.structured_input_signature[1], serve.structured_outputs
        for side, specs in (("inputs", inputs), ("outputs", outputs)):
            in_card = {key: (one["dtype"], one["shape"]) for key, one in card[name][side].items()}
            in_file = {key: (one.dtype.name, one.shape.as_list()) for key, one in specs.items()}
            assert in_card == in_file
    spec = card["serving_default"]["inputs"]["images"]
    if export.takes_tokens:
        assert spec == {"dtype": "int32", "shape": [None, 6], "vocabulary": 20}
    else:
        assert spec["range"] == ([0, 255] if export.takes_pixels else [-2, 2])


def test_image_files(export):
    """Decoded, normalised where the network does not do it, and named by its classes."""
    if len(export.input_shape) != 3:
        pytest.skip("takes no images")
    files = [image_files.encode(image.squeeze()) for image in export.pixels]
    named = export("predict_bytes", image_bytes=files)
    images = export.pixels.astype("float32")
    if not export.takes_pixels:
        images = COLOURS.normalize(export.pixels)
    scores = export(images=images)["probabilities"]
    highest = -np.sort(-scores, axis=-1)[:, :3]
    harness.close(named["scores"], highest, 1e-4)
    harness.close(np.take_along_axis(scores, named["indices"], -1), highest, 1e-4)
    names = [[DIGITS[i] for i in row] for row in named["indices"]]
    assert named["classes"].astype(str).tolist() == names


@pytest.mark.parametrize(
    ("shape", "dtype", "preprocessing", "size"),
    [
        ((8, 12, 3), "float32", COLOURS, (8, 12)),
        ((None, None, 3), "float32", COLOURS, (12, 12)),
        ((None, 8, 3), "float32", COLOURS, (12, 8)),
        ((8, 8, 3), "float32", None, None),  # whose normalisation is unknown
        ((8, 8, 2), "float32", GRAYS, None),
        ((8, 8, 3), "int32", COLOURS, None),
        ((6,), "float32", GRAYS, None),
    ],
    ids=str,
)
def test_the_size_of_image_files(shape, dtype, preprocessing, size):
    scores = types.SimpleNamespace(
        input_shape=shape, input_dtype=dtype, takes_pixels=False, takes=lambda shape: True
    )
    assert saved_model._size_of_files(scores, preprocessing) == size


def test_a_difference_that_rounding_makes_is_allowed():
    """This network magnifies the rounding of an image about 10,000 times."""
    network = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False),
            keras.layers.Activation(keras.ops.sin),
            keras.layers.Dense(2, use_bias=False),
        ]
    )
    network.set_weights([np.full((1, 1), 1e4, "float32"), np.ones((1, 2), "float32")])
    images = np.ones((3, 1), "float32")
    scores = _scores.take_apart(network)
    logits = _check.expected(scores, images)["logits"]
    found = _check._own_rounding(scores, images, logits)
    assert found == pytest.approx(abs(np.sin(1e4 * (1 + 2**-23)) - np.sin(1e4)), rel=0.3)
    assert _check.ROUNDINGS * found > 100 * _check.TOLERANCES["float32"]


def test_images_of_any_size_have_a_smallest_size(tmp_path):
    """TensorFlow may end the process of a server that computes a smaller one."""
    network = keras.Sequential(
        [
            keras.Input((None, None, 3)),
            keras.layers.Conv2D(4, (5, 80)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    path = kp.export.save(network, tmp_path / "any", classes=["cat", "dog"])
    signatures = tf.saved_model.load(path).signatures
    message = r"<<images must have at least the shape \(1, 5, 80, 3\)>>"
    for name in ("serving_default", "features"):
        for size in ((4, 80), (5, 79), (0, 0)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                signatures[name](images=tf.ones((1, *size, 3)))
        signatures[name](images=tf.ones((1, 5, 80, 3)))
    small = kp.preprocessing.Preprocessing(COLOURS.mean, COLOURS.std, 32)
    with pytest.raises(ValueError, match="to 32 x 32 pixels, which is too small for this network"):
        kp.export.save(network, tmp_path / "any", classes=["cat", "dog"], preprocessing=small)


def test_wrong_images_are_refused(export):
    shape, dtype = export.images.shape, export.images.dtype
    not_finite = np.full(shape, np.nan, "float32")
    for images, message in (
        (np.zeros([n + 1 for n in shape], dtype), "(?i)shape"),
        (np.zeros([0, *shape[1:]], dtype), "<<images holds no image>>"),
        *[(not_finite, "<<images holds a value that is not a finite number>>")]
        * (not export.takes_tokens),
    ):
        for signature in ("serving_default", "features"):
            with pytest.raises(tf.errors.InvalidArgumentError, match=message):
                export(signature, images=images)


def test_warm_up_requests_run(export):
    """One for each signature and batch size."""
    found = []
    for signature, inputs in Version(export.path).warm_up_requests():
        [n] = {len(value) for value in export(signature, **inputs).values()}
        found.append((signature, n))
    assert sorted(found) == sorted((name, n) for name in export.loaded.signatures for n in (1, 3))


def test_card_and_files(export):
    path, card = export.path, export.card
    assert path.name == "1"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["1", "model_card.json"]
    assert path.stat().st_mode & 0o777 == 0o755  # a server under another user reads it
    own = path / "assets.extra/model_card.json"
    assert own.read_text() == (path.parent / "model_card.json").read_text()
    assert card["files"] == {
        file.relative_to(path).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file() and file != own
    }
    wanted = {
        "name": "m",
        "version": 1,
        "classes": DIGITS,
        "pixels": export.takes_pixels,
        "activation": "softmax" if export.activation == "linear" else export.activation,
        "top_k": 3,
        "batch_sizes": [1, 3],
        "precision": "float32",
        "run": {"recipe": "digits", "directory": "runs/1"},
        "metrics": {"error": 0.25},
    }
    assert {key: card[key] for key in wanted} == wanted
    if export.preprocessing:
        assert kp.preprocessing.Preprocessing(**card["preprocessing"]) == export.preprocessing
    assert card["versions"]["keras"] == keras.__version__
    again = type(export.model).from_config(card["model"]["config"])
    assert again.count_params() == card["parameters"]["total"] == export.model.count_params()
    assert card["check"]["allowed_difference"]["logits"] < 1e-3


@pytest.mark.process
def test_tensorflow_alone_serves_it(tmp_path, monkeypatch):
    """In a process without Keras. Without oneDNN, as on a CPU without AVX-512, TensorFlow
    fuses a grouped convolution and its ReLU into an operation that refuses groups.
    """
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    model = two_stages(width=8, block=kp.blocks.Bottleneck(groups=4), input_shape=(8, 8, 3))
    path = kp.export.save(model, tmp_path / "m", classes=DIGITS, fold_batch_norm=False)
    images = harness.images(2, 8, 8, 3)
    found = _check.replay(path, {"two": images}, tmp_path)
    harness.close(found["two/logits"], model.predict(images, verbose=0))


# --- finding the logits, folding


def test_channels_first_is_served_channels_last():
    model = kp.models.resnet_cifar(
        8, width_factor=0.25, input_shape=(1, 12, 8), data_format="channels_first"
    )
    harness.randomize(model)
    scores = _scores.take_apart(model)
    images = _check.samples(scores)
    assert images.shape == (3, 12, 8, 1)
    calibration = np.moveaxis(images, -1, 1)
    np.testing.assert_array_equal(saved_model._check_calibration(calibration, scores), images)
    logits = keras.ops.convert_to_numpy(scores.core(images, training=False)[0])
    harness.close(_check.expected(scores, images)["logits"], logits)


class CentredDense(keras.layers.Dense):
    """A user's layer, which has another kernel than its own."""

    def call(self, inputs):
        return super().call(inputs) - keras.ops.matmul(inputs, keras.ops.ones_like(self.kernel))


class DoubledNorm(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training, mask)


def with_lora():
    layer = keras.layers.Dense(8, use_bias=False, lora_rank=2)
    layer.build((None, 8))
    harness.randomize(layer)
    return layer


#: Layers after an input `(4, 8)`, of which the last one cannot be folded into the one before.
UNFOLDABLE = {
    "a user's dense layer": lambda: [CentredDense(8), keras.layers.BatchNormalization()],
    "a user's normalisation": lambda: [keras.layers.Dense(8), DoubledNorm()],
    "another axis": lambda: [keras.layers.Dense(8), keras.layers.BatchNormalization(axis=1)],
    "LoRA": lambda: [with_lora(), keras.layers.BatchNormalization()],
}


@pytest.mark.parametrize("name", UNFOLDABLE)
def test_what_cannot_be_folded_stays(name):
    model = keras.Sequential([keras.Input((4, 8)), *UNFOLDABLE[name]()])
    harness.randomize(model)
    core = keras.Model(model.inputs[0], model.outputs[0])
    images = harness.images(4, 4, 8)
    harness.close(_flat.flat(core, fold=True)(images), model(images, training=False), 1e-5)


@pytest.mark.parametrize(
    ("last", "activation", "gives_probabilities"),
    [
        ([keras.layers.Dense(4)], "softmax", False),
        ([keras.layers.Dense(4, activation="softmax")], "softmax", True),
        ([keras.layers.Dense(4), keras.layers.Softmax()], "softmax", True),
        ([keras.layers.Dense(4), keras.layers.Activation("sigmoid")], "sigmoid", True),
        # mixed precision casts at the end
        ([keras.layers.Dense(4), CAST], "softmax", False),
        ([keras.layers.Dense(4, activation="sigmoid"), CAST], "sigmoid", True),
        ([keras.layers.Dense(4), CAST, keras.layers.Softmax(), CAST], "softmax", True),
    ],
)
def test_logits_of_other_models(last, activation, gives_probabilities):
    scores = _scores.take_apart(sequential(*last))
    assert (scores.activation, scores.gives_probabilities) == (activation, gives_probabilities)
    x = harness.images(5, 6)
    wanted = _check.expected(scores, x)
    logits = keras.ops.convert_to_numpy(scores.core(x)[0])
    harness.close(logits, wanted["logits"], 1e-6)
    harness.close(PROBABILITIES[activation](logits), wanted["probabilities"], 1e-6)


def test_probabilities_of_extreme_logits():
    x = np.array([[-1000.0, 0, 1000]])
    np.testing.assert_array_equal(PROBABILITIES["sigmoid"](x), [[0, 0.5, 1]])
    np.testing.assert_array_equal(PROBABILITIES["softmax"](x), [[0, 0, 1]])


@pytest.mark.parametrize(
    ("arrangement", "options"),
    [
        *((arrangement, {"use_bias": True}) for arrangement in kp.ARRANGEMENTS),
        ("original", {"use_bias": "unless_norm", "downsampling": "blur", "block": SQUEEZED}),
        ("original", {"block": STANDARDIZED}),
    ],
    ids=str,
)
def test_folded_networks_give_the_same(arrangement, options):
    """Every arrangement, with single units and stacks, projections, biases, and
    statistics far from the start.
    """
    options = options | {"arrangement": arrangement, "shape_shortcut": "projection"}
    model = two_stages(stacked=True, width=8, input_shape=(8, 8, 3), **options)
    harness.randomize(model)
    core = _scores.take_apart(model).core
    before = model.get_weights()
    images = harness.images(4, 8, 8, 3)
    wanted = core(images, training=False)
    flat = _flat.flat(core, fold=True)
    norms = [layer for layer in flat.layers if isinstance(layer, keras.layers.BatchNormalization)]
    after_weights = [isinstance(_scores._origin(norm.input)[0], _flat.WEIGHTS) for norm in norms]
    # a standardised kernel would lose the factor again
    assert any(after_weights) == (options.get("block") is STANDARDIZED)
    for output, own in zip(flat(images, training=False), wanted, strict=True):
        harness.close(output, own)
    np.testing.assert_equal(model.get_weights(), before)


def test_nested_models_are_unrolled():
    """Networks and stacks inside a functional model, a layer that is called twice, a
    nested model of two inputs, which stays one layer, and a convolution that more than
    its normalisation reads.
    """
    network = two_stages(
        stacked=True, width=8, input_shape=(8, 8, 3), include_top=False, pooling="avg"
    )
    pair = [keras.Input((16,)), keras.Input((16,))]
    both = keras.Model(pair, keras.layers.Add()(pair), name="both")
    inputs = keras.Input((8, 8, 3))
    read_twice = keras.layers.Conv2D(3, 1)(inputs)
    x = read_twice + keras.layers.BatchNormalization()(read_twice)
    model = keras.Model(inputs, keras.layers.Dense(3)(both([network(x), network(x[:, :, ::-1])])))
    harness.randomize(model)
    flat = _flat.flat(model, fold=True)
    assert not [layer for layer in flat.layers if isinstance(layer, kp.UnitStack)]
    images = harness.images(4, 8, 8, 3)
    harness.close(flat(images, training=False), model(images, training=False))


# --- 16 and 8 bits


@pytest.fixture(scope="module")
def labelled():
    """A network, images, and the labels that it gives them."""
    model = two_stages(stacked=True, width=8, input_shape=(8, 8, 1), mean=[77.0], std=[95.0])
    harness.randomize(model)
    images = np.random.default_rng(1).uniform(0, 255, (40, 8, 8, 1)).astype("float32")
    return model, images, model.predict(images, verbose=0).argmax(-1)


def save_labelled(model, images, labels, path, precision, **options):
    path = kp.export.save(
        model,
        path,
        classes=DIGITS,
        precision=precision,
        validation_data=(images, labels),
        max_accuracy_loss=1.0,  # what rounding turns depends on the processor
        **options,
    )
    card = json.loads((path / "assets.extra/model_card.json").read_text())
    assert card["precision"] == precision
    return tf.saved_model.load(str(path)), card


def test_bfloat16(labelled, tmp_path, monkeypatch):
    """Half the bytes, and float32 out."""
    monkeypatch.setattr(_check, "replay", in_this_process)
    loaded, card = save_labelled(*labelled, tmp_path / "m", "bfloat16")
    model, images, _ = labelled
    assert card["check"]["accuracy"]["model"] == 1
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.data*"))
    assert size < 0.6 * sum(4 * int(np.prod(weight.shape)) for weight in loaded.weights)
    outputs = loaded.core(tf.constant(images))
    assert {value.dtype for value in outputs.values()} == {tf.float32}
    logits = model.predict(images, verbose=0)
    difference = np.abs(outputs["logits"].numpy() - logits).max()
    assert 0 < difference < _check.TOLERANCES["bfloat16"] * np.abs(logits).max()


def test_mixed_precision_is_exported_in_float32(labelled, tmp_path, monkeypatch):
    """16 bits are exported, and compared on labelled images, only if they are asked for."""
    monkeypatch.setattr(_check, "replay", in_this_process)
    model, images, _ = labelled
    mixed = kp.transfer.changed_copy(model, dtype="mixed_bfloat16")
    path = kp.export.save(mixed, tmp_path / "m", classes=DIGITS)
    loaded = tf.saved_model.load(str(path))  # has the variables
    logits = loaded.core(tf.constant(images))["logits"]
    harness.close(logits, model.predict(images, verbose=0))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_network_in_16_bits_inside_a_model_keeps_them(precision, labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(_check, "replay", in_this_process)
    model, images, labels = labelled
    inputs = keras.Input(model.input_shape[1:])
    mixed = kp.transfer.changed_copy(model, dtype="mixed_bfloat16")
    outer = keras.Model(inputs, mixed(inputs))
    loaded, card = save_labelled(outer, images, labels, tmp_path / "m", precision)
    logits = loaded.core(tf.constant(images))["logits"].numpy()
    harness.close(logits, harness.numpy(outer(images)), 0.05 * np.abs(logits).max())
    assert np.abs(logits - model.predict(images, verbose=0)).max() > 1e-4
    if precision == "bfloat16":
        assert card["check"]["accuracy"]["images"] == len(images)
        message = "for the networks of this package"
        plain = keras.Model(inputs, model(inputs))
        with pytest.raises(ValueError, match=message):
            save_labelled(plain, images, labels, tmp_path / "p", precision)


@pytest.mark.process
def test_int8(labelled, tmp_path, monkeypatch):
    """The convolutions are in 8 bits for OpenVINO; TensorFlow's answers are those of
    float32, whatever the model computes in.
    """
    pytest.importorskip("nncf")
    ov = pytest.importorskip("openvino")
    monkeypatch.setattr(_check, "replay", in_this_process)
    model, images, labels = labelled
    mixed = kp.transfer.changed_copy(model, dtype="mixed_bfloat16")
    loaded, card = save_labelled(
        mixed, images, labels, tmp_path / "m", "int8", calibration_images=images[:8]
    )
    assert card["calibration_images"] == 8
    outputs = loaded.core(tf.constant(images))
    harness.close(outputs["logits"], model.predict(images, verbose=0))
    assert str(INT8) in card["files"]
    found = in_this_process(tmp_path / "m/1" / INT8, {"0": images}, tmp_path, "int8")
    for name, values in outputs.items():
        assert np.corrcoef(found[f"0/{name}"].ravel(), values.numpy().ravel())[0, 1] > 0.9
    graph = ov.Core().read_model(tmp_path / "m/1" / INT8)
    in_8_bits = [op for op in graph.get_ops() if op.get_element_type() == ov.Type.i8]
    assert len(in_8_bits) >= 13  # a stem and six units of two convolutions


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_the_accuracy_that_is_lost_has_a_limit(tmp_path, monkeypatch, precision):
    """Of 40 images, the model classifies 36 correctly and may lose one, not two."""

    def logits(wrong):
        right = np.arange(40) >= wrong
        return np.stack([right, ~right], axis=-1).astype("float32")

    def replay(path, batches, folder, runtime):
        served = {"bfloat16": (tmp_path, "saved_model"), "int8": (tmp_path / INT8, "int8")}
        assert (path, runtime) == served[precision]
        assert [len(images) for images in batches.values()] == [32, 8]
        return {"0/logits": logits(wrong)[:32], "32/logits": logits(wrong)[32:]}

    monkeypatch.setattr(_check, "replay", replay)
    probe = types.SimpleNamespace(predict=lambda **_: [logits(4)])
    outputs = Outputs(2, "softmax", are_logits=True)
    scores = types.SimpleNamespace(probe=probe, channels_first=False, outputs=outputs)
    given = (scores, np.zeros((40, 1)), np.zeros(40, int), tmp_path, tmp_path, precision, 0.03)
    wrong = 5
    found = _check.compare_accuracy(*given)
    assert found == {"images": 40, "model": 0.9, precision: 35 / 40, "max_loss": 0.03}
    wrong = 6
    with pytest.raises(kp.export.ExportError, match=f"85.00 % in {precision} and 90.00 %"):
        _check.compare_accuracy(*given)


# --- the check, versions, wrong input, failures: without the work of writing a graph


#: A word of the error, to what changes a served output.
REFUSED = {
    "logits differ from the model's by up to 0.01": ("logits", lambda x: x + 0.01),
    "differ from the model's by up to nan": ("logits", lambda x: x * np.float32(np.nan)),
    "are float64 of shape": ("logits", lambda x: x.astype("float64")),
    r"of shape \(., 1\)": ("logits", lambda x: x[:, :1]),
    "probabilities differ": ("probabilities", lambda x: x[:, ::-1]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_outputs_that_the_check_refuses(small, tmp_path, monkeypatch, message):
    scores = _scores.take_apart(small)
    name, change = REFUSED[message]

    def replay(path, batches, folder, runtime):
        found = {}
        for batch, images in batches.items():
            own = {key: x.astype("float32") for key, x in _check.expected(scores, images).items()}
            own |= {name: change(own[name])} if batch == "3" else {}
            found |= {f"{batch}/{key}": value for key, value in own.items()}
        return found

    monkeypatch.setattr(_check, "replay", replay)
    with pytest.raises(kp.export.ExportError, match=message):
        _check.compare(scores, tmp_path, tmp_path)


def test_diverged_weights_are_refused(small):
    small.set_weights([np.full(weight.shape, np.nan) for weight in small.get_weights()])
    with pytest.raises(ValueError, match="not finite"):
        _check.expected(_scores.take_apart(small), np.zeros((1, 6), "float32"))


@pytest.mark.usefixtures("quick")
def test_versions(small, tmp_path):
    def save(version=None):
        return int(kp.export.save(small, tmp_path / "m", classes=["a", "b"], version=version).name)

    def card_version(*path):
        return json.loads(tmp_path.joinpath("m", *path, "model_card.json").read_text())["version"]

    assert [save(), save(), save(10), save()] == [1, 2, 10, 11]
    assert save(4) == 4
    assert card_version() == 11  # the card beside the versions is the highest one's
    assert card_version("4/assets.extra") == 4
    with pytest.raises(ValueError, match=r"has a version 10.*next free one is 12"):
        save(10)
    for version in (0, 1.5, "2", True):
        with pytest.raises(ValueError, match="positive integer"):
            save(version)
    entries = sorted(entry.name for entry in (tmp_path / "m").iterdir())
    assert entries == ["1", "10", "11", "2", "4", "model_card.json"]
    (tmp_path / "m" / "0012").mkdir()  # for TensorFlow Serving this is version 12, too
    with pytest.raises(ValueError, match=r"has a version 12.*next free one is 13"):
        save(12)
    (tmp_path / "m" / ("9" * 20)).mkdir()  # which is no version
    assert save() == 13
    (tmp_path / "m" / str(2**63 - 1)).mkdir()
    for version in (None, 2**63):
        with pytest.raises(ValueError, match=f"must be at most {2**63 - 1}"):
            save(version)


@pytest.mark.usefixtures("quick")
def test_a_version_that_another_process_takes_meanwhile(small, tmp_path, monkeypatch):
    def compare(*_):
        (tmp_path / "m" / "1").mkdir()
        return {}

    monkeypatch.setattr(_check, "compare", compare)
    path = kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert path.name == "2"
    assert json.loads((path / "assets.extra/model_card.json").read_text())["version"] == 2
    (tmp_path / "m" / "1").rmdir()
    with pytest.raises(ValueError, match="has a version 1"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"], version=1)
    assert not list((tmp_path / "m" / "1").iterdir())


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_card_is_that_of_the_highest_version(tmp_path, monkeypatch, first, second):
    """Also if a process has chosen the card and not yet written it while another one publishes
    its version.
    """
    replace = Path.replace

    def publish(version):
        with _directory.workshop(tmp_path / "m") as temporary:
            (temporary / "version").mkdir()
            _directory.publish(temporary, tmp_path / "m", version, {})

    def late(path, target):
        monkeypatch.setattr(Path, "replace", replace)
        publish(second)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    publish(first)
    assert json.loads((tmp_path / "m" / "model_card.json").read_text())["version"] == 2
    names = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert names == ["1", "2", "model_card.json"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": ["a"]}, "each of the model's 2 outputs"),
        ({"classes": ["a", "a"]}, "unique"),
        ({"classes": "ab"}, "list of names"),
        ({"classes": [0, 1]}, "list of names"),
        ({"classes": ["a", "\udcff"]}, "a string that UTF-8 can hold"),
        ({"metrics": {"loss": float("nan")}}, "cannot hold 'metrics'"),
        ({"top_k": 0}, "positive integer"),
        *(
            ({"max_accuracy_loss": share}, "a share of 1, such as 0.005. Received: max")
            for share in (5, -0.1, float("nan"), "0.1")
        ),
        ({"batch_sizes": []}, "at least one"),
        ({"batch_sizes": (4, 2)}, "rising order"),
        ({"batch_sizes": (0, 2)}, "positive integer"),
        ({"precision": "int4"}, "precision"),
        ({"precision": "bfloat16"}, "needs validation_data"),
        ({"precision": "int8"}, "needs calibration_images"),
        (
            {"precision": "bfloat16", "validation_data": (np.zeros((3, 4)), np.zeros(2))},
            r"shapes \(3, 4\) and \(2,\)",
        ),
        (
            {"precision": "bfloat16", "validation_data": (np.zeros((3, 6)), np.zeros(3))},
            "networks of this package",
        ),
        ({"directory": ""}, "`directory` must be a path. Received: directory=''"),
        ({"directory": "file"}, "a file"),
        ({"directory": "models/a:b"}, "needs another name. A colon ends .* Received: 'a:b'"),
        ({"directory": "stats"}, "the statistics of all models, Triton's. Received: 'stats'"),
        ({"directory": "caf\udce9"}, "names are not UTF-8 are not served"),
        ({"directory": ".m"}, "start with a dot are not served. Received: '.m'"),
        ({"model": keras.Sequential([keras.layers.Dense(2)])}, "keras.Input"),
        ({"model": keras.layers.Dense(2)}, "functional"),
        ({"model": of_fixed_batches()}, "without a batch size. Received: .* for batches of 8"),
        ({"model": sequential(keras.layers.Dense(2, activation="relu"))}, "the activation relu"),
        *(
            ({"precision": "int8", "calibration_images": images}, message)
            for images, message in (
                (np.zeros((3, 4)), r"`calibration_images` must have the shape \(None, 6\)"),
                (np.full((3, 6), np.nan), "`calibration_images` must be finite"),
                (["a", "b"], "must be an array of images .* Received: a list of 2"),
                (keras.utils.PyDataset(), "must be an array of images"),
            )
        ),
        *(
            ({"precision": "bfloat16", "validation_data": data}, message)
            for data, message in (
                (np.zeros((3, 6)), r"two arrays .* Received: validation_data=a ndarray"),
                (([1], [2], [3]), "Received: validation_data=a tuple of 3"),
                ((np.zeros((3, 4)), np.zeros(3)), r"`validation_data\[0\]` must have the shape"),
                ((np.full((3, 6), np.inf), np.zeros(3)), r"`validation_data\[0\]` must be finite"),
            )
        ),
        ({"model": sequential(keras.layers.Dense(2, activation="tanh"))}, "end in a Dense layer"),
        ({"model": grouped(include_top=False)}, "include_top=True"),
        ({"model": grouped(), "classes": DIGITS, "preprocessing": {"unknown": 1}}, "unknown"),
        ({"model": grouped(), "classes": DIGITS, "preprocessing": GRAYS}, "model's 3 channels"),
    ],
)
def test_wrong_arguments(small, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    arguments = {"model": small, "directory": "m", "classes": ["a", "b"]} | arguments
    with pytest.raises((ValueError, TypeError), match=message):
        kp.export.save(**arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("save", "path", "options", "message"),
    [
        (
            kp.export.save,
            "m",
            {"precision": "int8", "calibration_images": np.zeros((1, 6))},
            r"needs nncf, openvino: pip install 'keras-preact\[int8\]'",
        ),
        (kp.export.save_onnx, "m.onnx", {}, r"needs onnx, tf2onnx, onnxruntime: .*\[onnx\]"),
        (kp.export.save_litert, "m.tflite", {}, r"needs ai_edge_litert: .*\[litert\]"),
    ],
    ids=["int8", "onnx", "litert"],
)
def test_a_missing_package(small, tmp_path, monkeypatch, save, path, options, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=message):
        save(small, tmp_path / path, classes=["a", "b"], **options)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("gone")], ids=repr)
@pytest.mark.parametrize(
    ("place", "step"), [(_check, "compare"), (Path, "rename"), (Path, "replace")], ids=str
)
def test_a_failure_leaves_nothing(small, tmp_path, error, place, step):
    """At the check, at the version's name and at the card; in a new folder and beside
    another version.
    """

    def fail(*_):
        raise error

    def save_in_vain(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, step, fail)
            with pytest.raises(type(error)):
                kp.export.save(small, folder, classes=["a", "b"])

    save_in_vain(tmp_path / "saved_models" / "m")
    assert not list(tmp_path.iterdir())
    kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*")}
    save_in_vain(tmp_path / "m")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "m").rglob("*")} == before


def test_full_disk(small, tmp_path, monkeypatch):
    def save(*_, **__):
        raise tf.errors.UnknownError(None, None, "variables; No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", save)
    with pytest.raises(OSError, match=r"no room for the export in .*m \(No space left on device\)"):
        kp.export.save(small, tmp_path / "m", classes=["a", "b"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "print('why'); raise SystemExit(3)",
            kp.export.ExportError,
            r"(?s)Writing failed \(exit status 3\). A hint. Its last lines:.*why",
        ),
        ("import os; os.kill(os.getpid(), 9)", kp.export.ExportError, "stopped by signal 9"),
        ("raise OSError(28, 'No space left on device')", OSError, "No space left"),
        (
            "print('why', flush=True); import time; time.sleep(100)",
            kp.export.ExportError,
            r"(?s)Writing failed \(stopped after 8 s\). A hint. Its last lines:.*why",
        ),
    ],
)
def test_a_process_that_fails(code, error, message, monkeypatch):
    monkeypatch.setattr(_children, "LIMIT", 8)
    with pytest.raises(error, match=message):
        _children.run(["-c", code], "Writing", " A hint.")
