"""What users bring: numbers of NumPy, and arrangements, shortcuts, blocks, normalisations,
activations and initialisers of their own, through every builder and its files.
"""

import dataclasses
import functools
import json

import keras
import numpy as np
import pytest

import keras_preact as kp
from tests.keras_preact import harness

integer, real = np.int64, np.float32

#: Calls with numbers of a type for whole numbers, and one for others.
CALLS = {
    "unit": lambda i, r: kp.ResidualUnit(
        i(16), strides=i(2), dropout=r(0.25), stochastic_depth=r(0.5)
    ),
    "block": lambda i, r: kp.ResidualUnit(
        i(8), block=kp.blocks.Bottleneck(groups=i(2), base_width=i(32), squeeze_excitation=i(2))
    ),
    "shortcut": lambda i, r: kp.ResidualUnit(
        i(8), shortcut=kp.shortcuts.Dropout(r(0.5), seed=i(3))
    ),
    "scaling": lambda i, r: kp.ResidualUnit(
        8, shortcut=kp.shortcuts.ConstantScaling(r(0.5), r(0.5))
    ),
    "stack": lambda i, r: kp.UnitStack(
        kp.ResidualUnit(i(4)), i(3), remat=i(2), unroll=i(2), stochastic_depth=[r(0.125)] * 3
    ),
    "transformer unit": lambda i, r: kp.TransformerUnit(i(8), num_heads=i(2), dropout=r(0.25)),
    "resnet_cifar": lambda i, r: kp.models.resnet_cifar(
        i(8), classes=i(3), width_factor=r(0.5), input_shape=(i(8), i(8), i(1)), dropout=r(0.25)
    ),
    "options": lambda i, r: kp.models.resnet_cifar(
        i(20), squeeze_excitation=i(4), mean=r(0.5), std=r(0.25), stochastic_depth=r(0.5)
    ),
    "wide_resnet": lambda i, r: kp.models.wide_resnet(i(10), i(1), input_shape=(i(8), i(8), i(3))),
    "resnet_imagenet": lambda i, r: kp.models.resnet_imagenet(
        i(18), classes=i(3), output_stride=i(16), input_shape=(i(64), i(64), i(3))
    ),
    "dense_resnet": lambda i, r: kp.models.dense_resnet(i(4), width=i(8), input_shape=(i(3),)),
    "transformer": lambda i, r: kp.models.transformer(
        i(1), width=i(8), num_heads=i(2), patch_size=i(2), input_shape=(i(4), i(4), i(1))
    ),
    "Fixup": lambda i, r: kp.initializers.Fixup(i(3), seed=i(1)),
    "DeltaOrthogonal": lambda i, r: kp.initializers.DeltaOrthogonal(r(2), seed=i(1)),
    "CoupledSGD": lambda i, r: kp.optimizers.CoupledSGD(
        r(0.5), momentum=r(0.5), coupled_weight_decay=r(0.25), gradient_accumulation_steps=i(2)
    ),
    "Muon": lambda i, r: kp.optimizers.Muon(r(0.5), weight_decay=r(0.25), rms_rate=r(0.25)),
    "vanilla_cnn": lambda i, r: kp.models.vanilla_cnn(
        i(5), filters=i(4), input_shape=(i(8), i(8), i(1))
    ),
    "network": lambda i, r: kp.models.ResidualNetwork(
        [(i(4), i(2)), (i(8), i(1), i(2))],
        stem="3x3",
        stem_filters=i(4),
        block="basic",
        input_shape=[i(8), i(8), i(3)],
        classes=i(2),
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_numbers_of_numpy(call):
    """The configuration is the one of Python's numbers, and JSON can hold it."""
    config = call(integer, real).get_config()
    names = ("name", "unit", "shortcut", "kernel_initializer", "bias_initializer")
    expected = call(int, float).get_config()
    for key in expected.keys() - set(names):
        assert config[key] == expected[key], key
    json.dumps({key: value for key, value in config.items() if key != "dtype"})


@pytest.mark.parametrize("value", [True, np.bool_(True), 0, -3, 2.0, np.float32(2), "2", None])
def test_what_is_no_positive_integer(value):
    assert "positive integer" in harness.error_of(lambda: kp.ResidualUnit(value))


# --- Objects of one's own, as a module of a user defines them


@keras.saving.register_keras_serializable("users")
@dataclasses.dataclass(frozen=True)
class Mixed(kp.shortcuts.Shortcut):
    share: float = 0.5

    def layers(self, site):
        return [site.weight(use_bias=False)]

    def paths(self, x, residual, transformed):
        return (1 - self.share) * x + self.share * transformed, residual


@keras.saving.register_keras_serializable("users")
@dataclasses.dataclass(frozen=True, kw_only=True)
class FiveByFive(kp.blocks.Convolutional):
    name = "five_by_five"
    kernel_sizes = (5, 3)

    def channels(self, filters):
        return (filters, filters)


@keras.saving.register_keras_serializable("users")
class Noise(keras.initializers.RandomNormal):
    pass


@keras.saving.register_keras_serializable("users")
def squared_relu(x):
    return keras.ops.square(keras.ops.relu(x))


OBJECTS = {
    "arrangement": kp.Arrangement(first=("activation",), between=("norm", "activation")),
    "shortcut": Mixed(0.25),
    "block": FiveByFive(),
    "normalization": keras.layers.GroupNormalization(2),
    "activation": squared_relu,
    "kernel_initializer": Noise(stddev=0.1),
}
BUILDERS = {
    "resnet_cifar": lambda **o: kp.models.resnet_cifar(8, width_factor=0.25, **o),
    "stacked": lambda **o: kp.models.resnet_cifar(14, width_factor=0.25, stacked=True, **o),
    "wide_resnet": lambda **o: kp.models.wide_resnet(10, 0.25, **o),
    "resnet_imagenet": lambda **o: kp.models.resnet_imagenet(
        (1, 1), width_factor=0.125, **{"block": "basic"} | o
    ),
    "resnet_1d": lambda **o: kp.models.resnet_1d(8, width_factor=0.25, **o),
}
#: Builders with a block of their own.
FIXED = [("wide_resnet", "block"), ("resnet_1d", "block")]


def size_of(builder) -> tuple[int, ...]:
    return (32, 3) if builder == "resnet_1d" else (32, 32, 3)


@functools.cache
def plain_config(builder) -> dict:
    """The configuration without objects of one's own. Tests leave it as it is."""
    return BUILDERS[builder](input_shape=size_of(builder), classes=3).get_config()


@pytest.mark.parametrize("option", OBJECTS)
@pytest.mark.parametrize("builder", BUILDERS)
def test_objects_of_ones_own(builder, option, tmp_path):
    if (builder, option) in FIXED:
        pytest.skip("it chooses its block")
    size = size_of(builder)
    model = BUILDERS[builder](input_shape=size, classes=3, **{option: OBJECTS[option]})
    x = harness.images(2, *size)
    y = harness.numpy(model(x))
    model.save(tmp_path / "model.keras")
    copy = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(harness.numpy(copy(x)), y)
    assert model.get_config()[option] != plain_config(builder)[option]


def test_depths_of_a_block_of_ones_own():
    message = harness.error_of(lambda: kp.models.resnet_cifar(21, block=FiveByFive()))
    assert "6n+2 for block='five_by_five'; the nearest are 20 and 26" in message


# --- Objects that a file cannot name: copies in this process have them


class Plain(kp.shortcuts.Shortcut):
    def paths(self, x, residual, transformed):
        return 0.5 * x, residual


@dataclasses.dataclass(frozen=True, kw_only=True)
class SevenBySeven(FiveByFive):
    kernel_sizes = (7, 3)


class Centred(keras.layers.LayerNormalization):
    pass


class Tenth(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None):
        return 0.1 * keras.ops.ones(shape, dtype)


def draw(shape, dtype=None):
    return 0.1 * keras.ops.ones(shape, dtype)


def softer(x):
    return keras.ops.softplus(x)


UNNAMED = {
    "shortcut": Plain(),
    "shortcut with a function": kp.shortcuts.Conv1x1(kernel_initializer=draw),
    "block": SevenBySeven(),
    "normalization": Centred(),
    "normalization with a function": keras.layers.LayerNormalization(gamma_initializer=draw),
    "activation: function": softer,
    "activation: lambda": lambda x: keras.ops.sigmoid(x),
    "activation: partial": functools.partial(keras.ops.leaky_relu, negative_slope=0.3),
    "kernel_initializer": draw,
    "kernel_initializer: class": Tenth(),
    "bias_initializer": draw,
    "classifier_activation": lambda x: keras.ops.softmax(x),
}


def network(**options):
    """A network with a unit that changes the shape, and two equal ones."""
    fixed = {"stem": "3x3", "stem_filters": 4, "block": "basic", "classes": 3}
    return kp.models.ResidualNetwork(
        [(4, 1), (4, 3, 2)], **fixed | {"input_shape": (8, 8, 3)} | options
    )


MAKERS = {
    "separate": lambda **o: network(stacked=False, **o),
    "stacked": lambda **o: network(stacked=True, **o),
    "transformer": lambda **o: kp.models.transformer(
        1, width=8, num_heads=2, input_shape=(8, 8, 3), **o
    ),
}


def slow(maker, number):
    """Separate and stacked units take the objects in turn; the other half is slow."""
    return maker == ("separate", "stacked")[number % 2]


@pytest.mark.backend
@pytest.mark.parametrize(
    ("maker", "option"),
    [
        pytest.param(maker, option, marks=pytest.mark.soak if slow(maker, i) else ())
        for maker in MAKERS
        for i, option in enumerate(UNNAMED)
    ],
)
def test_objects_that_are_not_registered(maker, option):
    name, value = option.split(":")[0].split(" ")[0], UNNAMED[option]
    if maker == "transformer":
        if name in ("shortcut", "block"):
            pytest.skip("its units have their own")
        name = {"activation": "mlp"}.get(name, name)
    options = {"use_bias": True} if name == "bias_initializer" else {}
    model = MAKERS[maker](**{name: value}, **options)
    harness.randomize(model)
    x = harness.images(2, 8, 8, 3)
    y = harness.numpy(model(x))
    copies = [kp.models.changed_copy(model, dtype="float32")]
    if maker != "transformer":
        copies.append(kp.models.changed_copy(model, stacked=maker != "stacked"))
    for copy in copies:
        harness.close(harness.numpy(copy(x)), y, 1e-5)
    unit = model.copy_units()[-1]
    stack = kp.UnitStack.from_units([unit, unit.at("second"), unit.at("third")][:1])
    assert stack.unit(0).count_params() == unit.count_params()


@pytest.mark.backend
@pytest.mark.parametrize("maker", MAKERS)
def test_activations_that_are_layers(maker, tmp_path):
    """Each place has weights of its own, in files, copies and stacks too."""
    template = keras.layers.PReLU(shared_axes=[1] if maker == "transformer" else [1, 2])
    model = MAKERS[maker](**{"mlp" if maker == "transformer" else "activation": template})
    harness.randomize(model)
    places = [weight.path for weight in model.weights if weight.path.endswith("alpha")]
    units = model.copy_units()
    assert len(set(places)) == len(places)
    assert len([w for unit in units for w in unit.weights if w.name == "alpha"]) in (1, 7)
    assert not template.built
    x = harness.images(2, 8, 8, 3)
    y = harness.numpy(model(x))
    model.save(tmp_path / "model.keras")
    copies = [keras.saving.load_model(tmp_path / "model.keras"), kp.models.changed_copy(model)]
    if maker != "transformer":
        copies.append(kp.models.changed_copy(model, stacked=maker != "stacked"))
        features = kp.transfer.feature_extractor(model, ["head"])
        features.save(tmp_path / "features.keras")
        keras.saving.load_model(tmp_path / "features.keras")
    for copy in copies:
        harness.close(harness.numpy(copy(x)), y, 1e-5)
    kp.analysis.audit(model)


@pytest.mark.backend
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Dense(4, kernel_initializer=draw, activation=softer),
        lambda: keras.layers.Dense(4, activation=lambda x: -x, bias_initializer=Tenth()),
        lambda: kp.TransformerUnit(4, num_heads=2, mlp=softer, bias_initializer=draw),
    ],
    ids=["function", "lambda", "unit"],
)
def test_stacks_of_layers_with_objects_that_are_not_registered(make):
    x = harness.images(2, 3, 4)
    unit = make()
    y = harness.numpy(unit(unit(x)))
    stack = kp.LayerStack.from_units([unit, unit])
    harness.close(harness.numpy(stack(x)), y, 1e-5)
    copy = type(stack).from_config(stack.get_config())
    assert copy(x).shape == x.shape


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="hooks of PyTorch")
def test_hooks_of_layers_inside_units():
    unit = kp.ResidualUnit(4)
    x = keras.ops.convert_to_tensor(harness.images(1, 4, 4, 4))
    unit(x)
    called = []
    for layer in (unit.first[0], unit.rest[0], unit.rest[-1]):
        layer.register_forward_hook(lambda layer, inputs, output: called.append(layer.name))
    unit(x, training=False)
    assert called == ["norm_0", "conv_1", "conv_2"]


@keras.saving.register_keras_serializable("users")
class Doubled(kp.ResidualUnit):
    def __init__(self, filters, *, factor=2.0, **kwargs):
        super().__init__(filters, **kwargs)
        self.factor = factor

    def call(self, x, drop_rate=None, training=None):
        return self.factor * super().call(x, drop_rate, training)

    def get_config(self):
        return super().get_config() | {"factor": self.factor}


def test_a_unit_of_ones_own():
    """Copies have its argument, and the arguments that it passes on."""
    unit = Doubled(4, factor=3.0, shortcut="conv1x1")
    x = harness.images(2, 5, 5, 4)
    y = harness.numpy(unit(x))
    stack = kp.UnitStack.from_units([unit])
    for copy in (unit.at("another"), unit.changed(), stack.unit(0)):
        copy(x)
        copy.set_weights(unit.get_weights())
        harness.close(harness.numpy(copy(x)), y, 1e-6)
