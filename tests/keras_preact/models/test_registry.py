"""Every registered model: narrow ones are built, of all the arithmetic is checked."""

import json
import re
import types
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.models import MODELS, cifar, dense, imagenet, registry, vanilla
from keras_preact.published import PARAMETER_COUNTS, RESULTS
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

ONE_OF_EACH_BUILDER = (
    "cifar_fast_resnet8",
    "cifar_wide_resnet16_8",
    "dense_resnet6",
    "digits_resnet8_preact",
    "digits_transformer6_postln",
    "imagenet_resnet18_original",
)

#: Too deep to be built in every format: tests/keras_preact/test_very_deep.py builds them.
VERY_DEEP = {"digits_resnet10001_preact", "digits_vanilla10000"}

#: Part of a name to arrangement.
ARRANGEMENTS = {
    "original": "original",
    "preact": "full_preactivation",
    "bn_after_addition": "bn_after_addition",
    "relu_before_addition": "relu_before_addition",
    "relu_only_preact": "relu_only_preactivation",
    "bn_only_preact": "bn_only_preactivation",
}


@pytest.fixture
def plan(monkeypatch):
    """Return a function from an entry's name to what its builder hands to
    `ResidualNetwork`, without building that.
    """
    calls = []

    def record(stages, **options):
        calls.append(
            types.SimpleNamespace(
                stages=[(stage.filters, stage.units, stage.strides) for stage in stages], **options
            )
        )
        return calls[-1]

    for module in (cifar, dense, imagenet, vanilla):
        monkeypatch.setattr(module, "ResidualNetwork", record)

    def make(name, **overrides):
        return kp.create_model(name, **overrides)

    make.calls = calls
    return make


def test_names():
    names = set(kp.list_models())
    cifar_depths = (20, 32, 44, 56, 110, 164, 1001, 1202)
    expected = {
        f"cifar_resnet{depth}_{kind}" for depth in cifar_depths for kind in ("preact", "original")
    }
    expected |= {f"cifar_resnet{depth}_{kind}" for depth in (110, 164) for kind in ARRANGEMENTS}
    expected |= {
        f"imagenet_resnet{d}_{kind}"
        for d in (18, 34, 50, 101, 152, 200)
        for kind in ("preact", "original")
    }
    expected |= {"imagenet_resnext50_32x4d_preact", "imagenet_resnext101_32x8d_preact"}
    expected |= {"cifar_wide_resnet16_8", "cifar_wide_resnet28_10", "cifar_wide_resnet40_4"}
    expected |= {"cifar_fast_resnet8"}
    expected |= {
        "digits_resnet8_preact",
        "digits_resnet20_preact",
        "dense_resnet6",
        "dense_resnet12",
    }
    expected |= {"digits_transformer6_preln", "digits_transformer6_postln"}
    expected |= VERY_DEEP
    assert names == expected
    assert len(kp.list_models()) == len(names)


def test_list_is_in_natural_order():
    depths = [
        int(re.search(r"\d+", name)[0])
        for name in kp.list_models("cifar_resnet*_preact")
        if "only" not in name
    ]
    assert depths == [20, 32, 44, 56, 110, 164, 1001, 1202]
    assert kp.list_models("digits_resnet*") == [
        f"digits_resnet{depth}_preact" for depth in (8, 20, 10_001)
    ]
    assert kp.list_models("vgg*") == []


def narrow(name: str) -> dict:
    """Return options that make a registered model small, with its own depth."""
    if name.startswith(("cifar", "imagenet")):
        return {"width_factor": 0.25, "input_shape": (32, 32, 3), "classes": 5}
    return {}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_BUILDER else pytest.mark.soak)
        for name in MODELS
        if name not in VERY_DEEP
    ],
)
def test_shapes_files_precision_and_formats(name, tmp_path):
    def build(**options):
        own = narrow(name)
        if own and options.get("data_format") == "channels_first":
            own["input_shape"] = own["input_shape"][::-1]
        return kp.create_model(name, **own | options)

    harness.check_model(build, tmp_path)
    model, entry = build(), kp.model_entry(name)
    assert model.name == name
    if not narrow(name):
        assert model.input_shape == (None, *entry.input_shape)
        assert model.output_shape == (None, entry.classes)


@pytest.mark.parametrize("name", [name for name in MODELS if "transformer" not in name])
def test_planned_model(name, plan):
    """The stages that the builder makes give the depth that stands in the name, and the
    published numbers of parameters.
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
        suffix = re.sub(r".*resnet\d+_", "", name)
        assert made.arrangement == ARRANGEMENTS[suffix]
    strides = [stride for _, _, stride in made.stages]
    first = [2] if "fast" in name else [1]
    assert strides == {1: [1], 3: [*first, 2, 2], 4: [1, 2, 2, 2]}[len(strides)]
    if entry.parameters:
        # 110 = 6 * 18 + 2 = 9 * 12 + 2 and 164 = 6 * 27 + 2 = 9 * 18 + 2 fit both rules
        block = "bottleneck" if depth in (164, 1001) else "basic"
        shape_shortcut = "projection" if depth in (164, 1001) else "zero_pad"
        assert (made.block, made.shape_shortcut) == (block, shape_shortcut)
        assert entry.parameters == PARAMETER_COUNTS[f"ResNet-{depth}"]


def test_widths(plan):
    def stages(name):
        return [(filters, units) for filters, units, _ in plan(name).stages]

    assert stages("cifar_resnet1001_preact") == [(16, 111), (32, 111), (64, 111)]
    assert stages("cifar_wide_resnet28_10") == [(160, 4), (320, 4), (640, 4)]
    assert stages("imagenet_resnet200_preact") == [(64, 3), (128, 24), (256, 36), (512, 3)]
    assert stages("cifar_fast_resnet8") == [(64, 1), (256, 1), (256, 1)]
    resnext = plan("imagenet_resnext101_32x8d_preact")
    assert (resnext.groups, resnext.base_width) == (32, 8)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("cifar_resnet20_original", [("6 of 1512.03385", "cifar10", 8.75)]),
        ("cifar_resnet20_preact", []),
        (
            "cifar_resnet110_original",
            [
                ("1", "cifar10", 6.61),
                ("2", "cifar10", 6.61),
                ("3", "cifar10", 6.61),
                ("6 of 1512.03385", "cifar10", 6.43),
            ],
        ),
        ("cifar_resnet110_preact", [("2", "cifar10", 6.37), ("3", "cifar10", 6.37)]),
        ("cifar_resnet164_bn_after_addition", [("2", "cifar10", 6.50)]),
        ("cifar_resnet164_bn_only_preact", []),
        (
            "cifar_resnet1001_preact",
            [("3", "cifar10", 4.92), ("3", "cifar100", 22.71), ("4", "cifar10", 4.62)],
        ),
        ("imagenet_resnet152_original", [("5", "imagenet", 23.0), ("5", "imagenet", 21.3)]),
        ("imagenet_resnet200_preact", [("5", "imagenet", 20.7), ("5", "imagenet", 20.1)]),
        ("digits_resnet20_preact", []),
    ],
)
def test_published_rows(name, rows):
    assert [(row.table, row.dataset, row.error) for row in kp.model_entry(name).published] == rows


def test_every_published_row_has_an_entry_unless_its_shortcut_or_block_is_special():
    carried = {row for entry in MODELS.values() for row in entry.published}
    for row in RESULTS:
        assert (row in carried) == (not {"shortcut", "block"} & set(row.arguments))


def test_preprocessing_of_entries():
    for name, entry in MODELS.items():
        family = name.split("_")[0]
        data = {"cifar": "cifar10", "dense": "digits"}.get(family, family)
        assert entry.preprocessing == kp.preprocessing.PREPROCESSING[data]
        if len(entry.input_shape) == 3:
            size = entry.preprocessing.size
            assert entry.input_shape == (size, size, len(entry.preprocessing.mean))


def test_overrides_go_to_the_builder(plan):
    made = plan(
        "cifar_resnet110_original",
        classes=100,
        shortcut="dropout",
        input_shape=(None, None, 1),
        width_factor=0.25,
    )
    assert (made.classes, made.shortcut, made.input_shape) == (100, "dropout", (None, None, 1))
    assert made.stages[0] == (4, 18, 1)
    assert (
        plan("cifar_resnet110_original", arrangement="full_preactivation").arrangement
        == "full_preactivation"
    )


@pytest.mark.parametrize("name", ["digits_resnet8_preact", "dense_resnet6"])
def test_include_preprocessing_takes_raw_pixels(name):
    entry = kp.model_entry(name)
    plain = kp.create_model(name)
    raw = kp.create_model(name, include_preprocessing=True)
    raw.set_weights(plain.get_weights())
    pixels = np.random.default_rng(0).integers(0, 256, (3, *entry.input_shape)).astype("float32")
    expected = plain(entry.preprocessing.normalize(pixels), training=False)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(raw(pixels, training=False)),
        keras.ops.convert_to_numpy(expected),
        atol=1e-5,
    )


def test_include_preprocessing_needs_the_entrys_channels(plan):
    for shape, options in (((32, 32, 1), {}), ((1, 32, 32), {"data_format": "channels_first"})):
        with pytest.raises(ValueError, match="are for 3 channels") as error:
            plan("cifar_resnet20_preact", input_shape=shape, include_preprocessing=True, **options)
        assert "mean= and std=" in str(error.value)
        assert f"input_shape={shape}" in str(error.value)
        made = plan("cifar_resnet20_preact", input_shape=shape, mean=1.0, std=2.0, **options)
        assert (made.mean, made.std) == (1.0, 2.0)
    with pytest.raises(ValueError, match="are for 1 channels"):
        plan("digits_resnet8_preact", input_shape=(8, 8, 3), include_preprocessing=True)
    assert plan("dense_resnet6", input_shape=(20,), include_preprocessing=True).input_shape == (20,)
    assert plan(
        "cifar_resnet20_preact", input_shape=(None, 64, 3), include_preprocessing=True
    ).mean == (125.3, 123.0, 113.9)


def test_include_preprocessing_has_no_rival(plan):
    with pytest.raises(
        ValueError, match="mean= and std= in place of include_preprocessing=True"
    ) as error:
        plan("cifar_resnet20_preact", include_preprocessing=True, std=2.0)
    assert "Received: std=2.0" in str(error.value)


@pytest.mark.parametrize(("suffix", "kind"), [(".weights.h5", str), (".keras", Path)])
def test_weights_from_a_file(tmp_path, suffix, kind):
    model = kp.create_model("digits_resnet8_preact")
    path = tmp_path / f"digits{suffix}"
    (model.save_weights if suffix == ".weights.h5" else model.save)(path)
    keras.utils.set_random_seed(1)
    loaded = kp.create_model("digits_resnet8_preact", weights=kind(path))
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("other", "suffix"),
    [
        ({"classes": 7}, ".weights.h5"),
        ({"arrangement": "original"}, ".keras"),
        ({"depth": 20}, ".weights.h5"),
        ({"width_factor": 0.5}, ".keras"),
    ],
)
def test_weights_of_another_network(tmp_path, other, suffix):
    path = tmp_path / f"digits{suffix}"
    model = kp.create_model("digits_resnet8_preact", **other)
    (model.save_weights if suffix == ".weights.h5" else model.save)(path)
    with pytest.raises(ValueError, match="another network than 'digits_resnet8_preact'") as error:
        kp.create_model("digits_resnet8_preact", weights=path)
    assert f"Received: weights={str(path)!r}" in str(error.value)


def write_text(path):
    path.write_text("no weights")


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")


def write_hdf5(path):
    with h5py.File(path, "w") as file:
        file["weights"] = [1.0, 2.0]


@pytest.mark.parametrize(
    ("write", "suffix"),
    [
        (write_text, ".weights.h5"),
        (write_text, ".keras"),
        (write_zip, ".keras"),
        (write_hdf5, ".weights.h5"),
    ],
)
def test_damaged_weights(tmp_path, write, suffix):
    path = tmp_path / f"digits{suffix}"
    write(path)
    with pytest.raises(ValueError, match="The file is damaged") as error:
        kp.create_model("digits_resnet8_preact", weights=path)
    assert f"Received: weights={str(path)!r}" in str(error.value)


TRAINED = [(name, weights) for name, entry in MODELS.items() for weights in entry.weights]
SAVED_MODELS = Path(__file__).parents[3] / "saved_models"


def test_every_file_of_weights_has_its_card():
    assert {f"{name}.{weights}" for name, weights in TRAINED} == {
        path.name.removesuffix(".json") for path in registry.TRAINED.glob("*.json")
    }
    assert ("cifar_resnet20_preact", "cifar10") in TRAINED
    assert sum(path.stat().st_size for path in registry.TRAINED.iterdir()) < 6e6


@pytest.mark.parametrize(("name", "weights"), TRAINED)
def test_trained_weights_are_those_of_the_exported_network(name, weights):
    """In half precision, which the card's figures include."""
    tf = pytest.importorskip("tensorflow")
    card = json.loads((registry.TRAINED / f"{name}.{weights}.json").read_text())
    assert (card["model"], card["images"]) == (f"{name}:{weights}", 10_000)
    [exported] = [
        path
        for path in SAVED_MODELS.glob("*/model_card.json")
        if json.loads(path.read_text())["model"]["name"] == name
    ]
    run = json.loads(exported.read_text())["run"]
    assert (card["trained"]["recipe"], card["trained"]["seed"]) == (
        run["recipe"],
        run["config"]["seed"],
    )
    served = tf.saved_model.load(str(exported.parent / "1"))
    model = kp.create_model(name, weights=weights, include_preprocessing=True)
    images = np.random.default_rng(0).uniform(0, 255, (4, 32, 32, 3)).astype("float32")
    want = served.signatures["serving_default"](images=tf.constant(images))["logits"].numpy()
    got = keras.ops.convert_to_numpy(model(images, training=False))
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


def test_trained_weights_do_not_fit_other_classes():
    with pytest.raises(ValueError, match="another network than 'cifar_resnet20_preact'"):
        kp.create_model("cifar_resnet20_preact", weights="cifar10", classes=100)


def test_weights_fit_with_and_without_preprocessing(tmp_path):
    path = tmp_path / "digits.weights.h5"
    model = kp.create_model("digits_resnet8_preact")
    model.save_weights(path)
    loaded = kp.create_model("digits_resnet8_preact", include_preprocessing=True, weights=path)
    for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        (
            "imagenet",
            ("weights in this package", ".weights.h5 or .keras", "weights='imagenet'"),
        ),
        (True, ("weights in this package", "weights='True'")),
        ("nowhere/a.keras", ("names no file", "weights='nowhere/a.keras'")),
    ],
)
def test_bad_weights_are_found_before_building(plan, weights, parts):
    with pytest.raises(ValueError, match="Received") as error:
        plan("imagenet_resnet200_preact", weights=weights)
    assert all(part in str(error.value) for part in parts)
    assert plan.calls == []


@pytest.mark.parametrize("function", [kp.create_model, kp.model_entry])
@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cifar_resnet110_preakt", ["cifar_resnet110_preact"]),
        ("dense_resnet", ["dense_resnet6", "dense_resnet12"]),
        ("resnet50", ["imagenet_resnet50_original", "imagenet_resnet50_preact"]),
        (None, []),
        (["dense_resnet6"], ["dense_resnet6"]),
    ],
)
def test_unknown_name(function, name, near):
    with pytest.raises(ValueError, match="Unknown name") as error:
        function(name)
    named = re.findall(r"'(\w+)'", str(error.value).split("?")[0])
    assert len(named) == 3
    assert set(near) <= set(named) <= set(MODELS)
    assert str(error.value).endswith(f"all {len(MODELS)}. Received: name={name!r}")


def test_unknown_option():
    with pytest.raises(ValueError, match="arangement"):
        kp.create_model("digits_resnet8_preact", arangement="original")


def test_entries_cannot_be_changed():
    entry = kp.model_entry("digits_resnet8_preact")
    with pytest.raises(AttributeError):
        entry.classes = 3
    with pytest.raises(TypeError, match="does not support item assignment"):
        entry.arguments["depth"] = 20
    with pytest.raises(TypeError, match="does not support item assignment"):
        MODELS["digits_resnet8_preact"] = entry
