"""Every registered model: one of each builder is built, of all the arithmetic is checked."""

import collections
import functools
import hashlib
import json
import operator
import re
import shutil
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import keras_preact as kp
from keras_preact.models import MODELS, cifar, dense, imagenet, registry, vanilla
from keras_preact.published import PARAMETER_COUNTS, RESULTS
from tests.keras_preact import harness


@pytest.fixture
def plan(monkeypatch):
    """Return a function from an entry's name to what its builder hands to
    `ResidualNetwork`, without building that.
    """

    def record(stages, **options):
        stages = [(stage.filters, stage.units, stage.strides) for stage in stages]
        return types.SimpleNamespace(stages=stages, **options)

    for module in (cifar, dense, imagenet, vanilla):
        monkeypatch.setattr(module, "ResidualNetwork", record)

    return kp.create_model


def test_names_in_natural_order():
    depths = [int(name[12:-7]) for name in kp.list_models("cifar_resnet*[0-9]_preact")]
    assert depths == [20, 32, 44, 56, 110, 164, 1001, 1202]
    assert kp.list_models("digits_resnet*") == [f"digits_resnet{d}_preact" for d in (8, 20, 10_001)]
    families = collections.Counter(name.split("_")[0] for name in MODELS)
    assert families == {"cifar": 28, "imagenet": 14, "digits": 6, "dense": 2}


ONE_OF_EACH_BUILDER = (
    "digits_resnet8_preact",
    "cifar_fast_resnet8",
    "cifar_wide_resnet16_8",
    "dense_resnet6",
    "digits_transformer6_postln",
    "imagenet_resnet18_original",
)
#: test_very_deep.py trains those of ten thousand layers.
OTHERS = [name for name in MODELS if name not in ONE_OF_EACH_BUILDER and "1000" not in name]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(ONE_OF_EACH_BUILDER[0], marks=pytest.mark.backend),
        *ONE_OF_EACH_BUILDER[1:],
        *(pytest.param(name, marks=pytest.mark.soak) for name in OTHERS),
    ],
)
def test_shapes_files_precision_and_formats(name, tmp_path):
    def build(**options):
        if name.startswith(("cifar", "imagenet")):
            first = options.get("data_format") == "channels_first"
            shape = (3, 32, 32) if first else (32, 32, 3)
            options |= {"width_factor": 0.25, "input_shape": shape}
        return kp.create_model(name, **options)

    harness.check_model(build, tmp_path)


@pytest.mark.parametrize("name", [name for name in MODELS if "transformer" not in name])
def test_planned_model(name, plan):
    """The stages that the builder makes give the depth in the name, and the published
    numbers of parameters.
    """
    entry = kp.model_entry(name)
    made = plan(name)
    json.dumps(dict(entry.arguments))
    units = [units for _, units, _ in made.stages]
    weights = {"basic": 2, "bottleneck": 3, "dense": 2, "single": 1}[kp.blocks.get(made.block).name]
    # stem and classifier; a wide network counts its projections, too, of which the stem's widening
    # is one
    extra = 4 if "wide" in name else 2
    depth = int(re.search(r"\d+", name)[0])
    assert weights * sum(units) + extra == depth
    assert (made.name, made.classes, made.input_shape) == (name, entry.classes, entry.input_shape)
    if "_resnet" in name and not re.search("wide|fast|dense", name):
        kind = re.sub(r".*resnet\d+_", "", name)
        kind = "full_preact" if kind == "preact" else kind
        assert made.arrangement == re.sub("preact$", "preactivation", kind)
    strides = [stride for _, _, stride in made.stages]
    first = [2] if "fast" in name else [1]
    assert strides == {1: [1], 3: [*first, 2, 2], 4: [1, 2, 2, 2]}[len(strides)]
    if entry.parameters:
        # 110 = 6 * 18 + 2 = 9 * 12 + 2 and 164 = 6 * 27 + 2 = 9 * 18 + 2 fit both rules
        block = "bottleneck" if depth in (164, 1001) else "basic"
        shape_shortcut = "projection" if depth in (164, 1001) else "zero_pad"
        assert (made.block, made.shape_shortcut) == (block, shape_shortcut)
        assert entry.parameters == PARAMETER_COUNTS[f"ResNet-{depth}"]
    data = {"cifar": "cifar10", "dense": "digits"}.get(name.split("_")[0], name.split("_")[0])
    assert entry.preprocessing == kp.preprocessing.PREPROCESSING[data]


def test_widths(plan):
    def stages(name):
        return [(filters, units) for filters, units, _ in plan(name).stages]

    assert stages("cifar_resnet1001_preact") == [(16, 111), (32, 111), (64, 111)]
    assert stages("cifar_wide_resnet28_10") == [(160, 4), (320, 4), (640, 4)]
    assert stages("imagenet_resnet200_preact") == [(64, 3), (128, 24), (256, 36), (512, 3)]
    resnext = plan("imagenet_resnext101_32x8d_preact")
    assert (resnext.groups, resnext.base_width) == (32, 8)


def test_every_published_row_has_an_entry_unless_its_shortcut_or_block_is_special():
    carried = {row for entry in MODELS.values() for row in entry.published}
    for row in RESULTS:
        assert (row in carried) == (not {"shortcut", "block"} & set(row.arguments))


#: Names of other libraries and papers, and a part of the advice.
OTHER_NAMES = {
    "ResNet50V2": "kp.applications.ResNet50V2() is keras.applications'",
    "resnet152_v2": "--model.weights ResNet152V2:imagenet",
    "resnetv2_50": "kp.weights.from_timm(FILE)",
    "resnetv2_18d.ra4_e3600_r224_in1k": "'imagenet_resnet18_preact'",
    "resnet_v2_50_imagenet": "kp.weights.from_keras_hub(MODEL)",
    "PreActResNet18": "kp.weights.from_torch_cifar(FILE)",
    "preact_resnet-34": "kp.models.resnet_imagenet(34, stem='3x3'",
    "preresnet20_cifar10": "kp.weights.from_pytorchcv(FILE)",
    "WRN-28-10": "kp.models.wide_resnet(28, 10)",
    "resnet50d": "kp.models.resnet_imagenet(50, stem='deep', downsampling='average')",
    "resnet50": "'imagenet_resnet50_preact'",
    "ResNet-110": "'cifar_resnet110_preact'",
    "resnet20v2": "'cifar_resnet20_original'",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_of_other_libraries(name):
    message = harness.error_of(lambda: kp.create_model(name))
    assert OTHER_NAMES[name] in message
    for call in re.findall(r"kp\.(\w+\.\w+)", message):  # they exist
        operator.attrgetter(call)(kp)
    assert set(re.findall(r"'(\w+_resnet\w+)'", message)) <= MODELS.keys()


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ("imagenet", "kp.applications.ResNet50V2(weights='imagenet')"),
        ("IMAGENET1K_V2", "kp.weights.from_timm(FILE)"),
        (True, "kp.weights.from_timm(FILE)"),
        ("resnetv2_50.safetensors", "`keras-preact convert`"),
        ("ckpt.pth", "from_torch_cifar"),
        ("nowhere/a.keras", "not an existing file"),
    ],
)
def test_other_weights_are_found_before_building(weights, part, monkeypatch):
    monkeypatch.setattr(imagenet, "ResidualNetwork", None)
    name = "imagenet_resnet50_preact"
    assert part in harness.error_of(lambda: kp.create_model(name, weights=weights))


@pytest.mark.parametrize("name", ["digits_resnet8_preact", "dense_resnet6"])
def test_include_preprocessing_takes_raw_pixels(name, tmp_path):
    """Files of weights fit with and without it."""
    entry, plain = kp.model_entry(name), kp.create_model(name)
    plain.save_weights(path := tmp_path / "net.weights.h5")
    raw = kp.create_model(name, include_preprocessing=True, weights=path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, *entry.input_shape)).astype("float32")
    expected = plain(entry.preprocessing.normalize(pixels), training=False)
    harness.close(harness.numpy(raw(pixels, training=False)), harness.numpy(expected))


def test_include_preprocessing_needs_the_entrys_channels(plan):
    def built(name="cifar_resnet20_preact", **options):
        return plan(name, include_preprocessing=True, **options)

    gray = {"input_shape": (1, 32, 32), "data_format": "channels_first"}
    for options in ({"input_shape": (32, 32, 1)}, gray):
        message = harness.error_of(lambda options=options: built(**options))
        assert "are for 3 channels" in message
    assert built("dense_resnet6", input_shape=(20,)).input_shape == (20,)
    assert built(input_shape=(None, 64, 3)).mean == (125.3, 123.0, 113.9)
    assert "in place of include_preprocessing" in harness.error_of(lambda: built(std=2.0))


@pytest.mark.parametrize(("suffix", "kind"), [(".weights.h5", str), (".keras", Path)])
def test_weights_from_a_file(tmp_path, suffix, kind):
    def save(path, **options):
        model = kp.create_model("digits_resnet8_preact", **options)
        (model.save_weights if suffix == ".weights.h5" else model.save)(path)
        return model

    path = tmp_path / f"digits{suffix}"
    model = save(path)
    loaded = kp.create_model("digits_resnet8_preact", weights=kind(path))
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for i, other in enumerate([{"classes": 7}, {"arrangement": "original"}, {"width_factor": 0.5}]):
        save(path := tmp_path / f"{i}{suffix}", **other)
        message = harness.error_of(
            lambda path=path: kp.create_model("digits_resnet8_preact", weights=path)
        )
        assert "another network" in message


@pytest.mark.parametrize("name", ["text.weights.h5", "text.keras"])
def test_damaged_weights(tmp_path, name):
    (path := tmp_path / name).write_text("no weights")
    message = harness.error_of(lambda: kp.create_model("digits_resnet8_preact", weights=path))
    assert "The file is damaged" in message


TRAINED = [(name, weights) for name, entry in MODELS.items() for weights in entry.weights]
SAVED_MODELS = Path(__file__).parents[3] / "saved_models"


@pytest.mark.parametrize(("name", "weights"), TRAINED)
def test_trained_weights_are_those_of_the_exported_network(name, weights):
    """In half precision, which the card's figures include."""
    tf = pytest.importorskip("tensorflow")
    card = json.loads((registry.TRAINED / f"{name}.{weights}.json").read_text())
    assert (card["model"], card["images"]) == (f"{name}:{weights}", 10_000)
    cards = {path: json.loads(path.read_text()) for path in SAVED_MODELS.glob("*/model_card.json")}
    [(path, exported)] = [each for each in cards.items() if each[1]["model"]["name"] == name]
    assert card["trained"]["iterations"] == exported["run"]["iterations"]
    assert card["trained"]["seed"] == exported["run"]["config"]["seed"]
    served = tf.saved_model.load(str(path.parent / str(exported["version"]))).signatures[
        "serving_default"
    ]
    model = kp.create_model(name, weights=weights, include_preprocessing=True)
    images = np.random.default_rng(0).uniform(0, 255, (4, 32, 32, 3)).astype("float32")
    want = served(images=tf.constant(images))["logits"].numpy()
    got = harness.numpy(model(images, training=False))
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


@pytest.mark.backend
@pytest.mark.parametrize(("name", "weights"), TRAINED)
def test_trained_weights_are_as_accurate_as_their_card_says(name, weights):
    """On 100 test images of CIFAR-10, in pixels: ten of each class, a row of the picture
    for each. The standard deviation of their accuracy is 3 %.
    """
    mosaic = np.asarray(Image.open(Path(__file__).parent / "cifar10_sample.png"), "float32")
    images = mosaic.reshape(10, 32, 10, 32, 3).swapaxes(1, 2).reshape(100, 32, 32, 3)
    model = kp.create_model(name, weights=weights, include_preprocessing=True)
    classes = harness.numpy(model(images, training=False)).argmax(axis=1)
    card = json.loads((registry.TRAINED / f"{name}.{weights}.json").read_text())
    assert (classes == np.arange(100) // 10).mean() == pytest.approx(card["accuracy"], abs=0.06)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": 100}, "classes=100"),
        ({"width_factor": 2, "dtype": "float16"}, "width_factor=2"),
        ({"shortcut": "constant_scaling"}, "shortcut='constant_scaling'"),
        ({"activation": "elu"}, "activation='elu'"),
    ],
)
def test_trained_weights_are_not_for_other_options(options, words):
    """Also not for those that leave the shapes of all weights."""
    create = functools.partial(kp.create_model, "cifar_resnet20_preact", weights="cifar10")
    message = harness.error_of(functools.partial(create, **options))
    assert f"without {words}. Leave that out" in message
    create(classes=10, arrangement="full_preactivation", dropout=0.1)


@pytest.mark.backend
@pytest.mark.parametrize("first", [False, True])
def test_trained_weights_for_other_channels(first):
    """One channel gets the kernel's sum: a grey image has the same scores."""
    name, options = "cifar_resnet20_preact", {"weights": "cifar10", "include_top": False}
    x = harness.images(2, 32, 32, 1)
    want = harness.numpy(kp.create_model(name, **options)(np.repeat(x, 3, -1)))
    if first:
        x, options = x.transpose(0, 3, 1, 2), options | {"data_format": "channels_first"}
    grey = kp.create_model(name, input_shape=x.shape[1:], mean=0.0, **options)
    got = harness.numpy(grey(x))
    harness.close(got.transpose(0, 2, 3, 1) if first else got, want, 1e-4)
    message = harness.error_of(
        lambda: kp.create_model("cifar_fast_resnet8", weights="cifar10", input_shape=(32, 32, 1))
    )
    assert "The weights do not fit the network 'cifar_fast_resnet8'" in message


@pytest.mark.backend
@pytest.mark.parametrize(
    "options",
    [
        {"stacked": False},
        {"zero_init_last": True, "bias_initializer": "ones", "dropout_at": "before_addition"},
        {"dropout": 0.1, "dropout_varies": True},
        {"output_stride": 4, "include_top": True},
        {"shortcut": kp.shortcuts.Identity(), "block": kp.blocks.Basic(), "width_factor": 1},
        {"normalization": "batch", "kernel_regularizer": None},
    ],
    ids=harness.label,
)
def test_trained_weights_with_options_that_leave_the_network(options):
    name, x = "cifar_resnet20_preact", harness.images(2, 32, 32, 3)
    want = harness.numpy(kp.create_model(name, weights="cifar10")(x))
    got = harness.numpy(kp.create_model(name, weights="cifar10", **options)(x))
    np.testing.assert_array_equal(got, want)


@pytest.mark.backend
@pytest.mark.parametrize(
    "options", [{"stacked": True}, {"execution": "loop", "unroll": 2}], ids=str
)
def test_trained_weights_in_stacks(options):
    name = "cifar_resnet20_preact"
    single = kp.create_model(name, weights="cifar10")
    stacked = kp.create_model(name, weights="cifar10", **options)
    assert [segment.name for segment in stacked.segments][:2] == ["stage1_unit1", "stage1_units"]
    want, got = kp.weights.named(single), kp.weights.named(stacked)
    assert want.keys() == got.keys()
    for path, weight in want.items():
        np.testing.assert_array_equal(got[path].value(), weight.value(), path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:99] + b"x" + data[100:]]
)
def test_damaged_trained_weights(damage, tmp_path, monkeypatch):
    shutil.copytree(registry.TRAINED, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(registry, "TRAINED", tmp_path)
    create = functools.partial(kp.create_model, "cifar_resnet20_preact", weights="cifar10")
    create()
    path = tmp_path / "cifar_resnet20_preact.cifar10.weights.h5"
    path.write_bytes(damage(path.read_bytes()))
    message = harness.error_of(create)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in message
    assert "Install keras-preact again" in message


def test_every_file_of_weights_has_its_card():
    cards = {path.name.removesuffix(".json") for path in registry.TRAINED.glob("*.json")}
    assert {f"{name}.{weights}" for name, weights in TRAINED} == cards


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cifar_resnet110_preakt", ["cifar_resnet110_preact"]),
        ("resnet50", ["imagenet_resnet50_original", "imagenet_resnet50_preact"]),
        (None, []),
    ],
)
def test_unknown_name(name, near):
    message = harness.error_of(lambda: kp.create_model(name))
    assert all(each in message for each in near)
    assert "Unknown name" in message
