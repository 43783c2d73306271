"""The residual units of a graph."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from keras.src.applications.inception_resnet_v2 import CustomScaleLayer

import keras_preact as kp
from keras_preact import sums
from keras_preact.analysis.additions import find_units
from keras_preact.graph import Graph
from tests.keras_preact import harness

IMAGES = harness.images(4, 8, 8, 3)


def close(got, want):
    harness.close(ops.convert_to_numpy(got), ops.convert_to_numpy(want), 1e-5)


def network(depth):
    model = kp.models.resnet_cifar(depth, input_shape=(8, 8, 3), width_factor=0.25, stacked=True)
    harness.randomize(model)
    return model


def test_units_of_a_network():
    model = network(26)
    assert harness.longest_stack(model) == 3
    graph = Graph(model, IMAGES)
    values = graph.run(graph.values(IMAGES))
    outputs = keras.Model(model.input, model.unit_outputs)(IMAGES)
    units = find_units(graph)
    assert len(units) == len(outputs) == 12
    for addition, x in zip(units, outputs, strict=True):
        close(values[addition.total], x)
        close(values[addition.shortcut] + values[addition.residual], x)
        assert graph.weights_of(addition.residual_steps) == 2
        assert graph.weights_of(addition.shortcut_steps) == 0
    # the raw x where the shape stays, the activated one where it changes
    totals = [unit.total for unit in units]
    assert [unit.start in totals for unit in units] == [False, True, True, True] * 3
    assert [unit.before for unit in units[1:]] == totals[:-1]
    assert [unit.is_first for unit in units] == [True] + [False] * 11
    assert [unit.keeps_shape for unit in units] == [True] * 4 + ([False] + [True] * 3) * 2


def test_f_is_what_follows_an_addition_but_no_weight_layer():
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    for between in (layers.ReLU(), layers.Dense(4), layers.ReLU(), layers.ReLU()):
        x = between(layers.Add()([x, layers.Dense(4)(layers.ReLU()(x))]))
    graph = Graph(keras.Model(inputs, x), harness.images(2, 4))
    units = find_units(graph)
    kinds = [graph.steps[graph.producers[unit.output]].kind for unit in units]
    assert kinds == ["ReLU", "Add", "ReLU", "ReLU"]
    assert [graph.steps[i].kind for unit in units for i in unit.shared] == ["ReLU", "Dense", "ReLU"]


def test_a_gate_is_no_part_of_what_it_multiplies():
    """The shortcut has more weights than the branch, and as large a kernel."""
    inputs = keras.Input((4,))
    gate = layers.Dense(4, activation="sigmoid")(layers.Dense(4)(inputs))
    gated = layers.Multiply()([gate, inputs])
    model = keras.Model(inputs, layers.Add()([layers.Dense(4)(inputs), gated]))
    graph = Graph(model, harness.images(2, 4))
    (unit,) = find_units(graph)
    assert graph.steps[graph.producers[unit.shortcut]].kind == "Multiply"
    assert [graph.steps[i].kind for i in unit.branch] == ["Dense"]


def test_opaque_layers_stay_one_step():
    model = network(20)
    graph = Graph(model, IMAGES, opaque=(kp.UnitStack, kp.ResidualUnit))
    kinds = [step.kind for step in graph.steps]
    assert kinds.count("UnitStack") == kinds.count("ResidualUnit") == 3
    units = find_units(graph)
    assert [unit.is_stack for unit in units] == [False, True] * 3
    assert units[1].names == ("stage1_unit2", "stage1_unit3")
    assert graph.steps[units[1].step].name == "stage1_units"
    values = graph.values(IMAGES)
    for _ in graph.walk(values, calls={units[1].step: lambda x: 2 * x}):
        pass
    close(values[units[1].output], 2 * values[units[1].start])


def branch(x, tanh=False):
    x = layers.Dense(4)(layers.BatchNormalization()(x))
    return layers.Activation("tanh")(x) if tanh else x


class Untraced(keras.layers.Layer):
    """Arithmetic in functions of the backend."""

    def call(self, x):
        return tf.identity(x)


#: Sums of x, f and g, as people write them: the factors on x and on the branches, and the sum.
SUMS = {
    "Add": (1, (1,), lambda x, f, g: layers.Add()([f, x])),
    "+": (1, (1,), lambda x, f, g: x + f),
    "Add of three": (1, (1, 1), lambda x, f, g: layers.Add()([f, g, x])),
    "(x + f) + g": (1, (1, 1), lambda x, f, g: x + f + g),
    "x + (f + g)": (1, (1, 1), lambda x, f, g: x + (f + g)),
    "(f + x) + (g + f)": (1, (2, 1), lambda x, f, g: (f + x) + (g + f)),
    "Add, then +": (1, (1, 1), lambda x, f, g: g + layers.Add()([x, f])),
    "(x + f) + x": (2, (1,), lambda x, f, g: x + f + x),
    "(x + x) + f": (2, (1,), lambda x, f, g: (x + x) + f),
    "Average": (1, (1,), lambda x, f, g: layers.Average()([x, f])),
    "Average of three": (1, (1, 1), lambda x, f, g: layers.Average()([f, x, g])),
    "Subtract": (1, (-1,), lambda x, f, g: layers.Subtract()([x, f])),
    "-": (1, (-1, 1), lambda x, f, g: x - f + g),
    "f - x": (-1, (1,), lambda x, f, g: f - x),
    "Lambda": (
        1,
        (0.5,),
        lambda x, f, g: layers.Lambda(lambda both: both[0] + 0.5 * both[1])([x, f]),
    ),
    "Lambda of a term": (
        0.5,
        (1,),
        lambda x, f, g: layers.Add()([layers.Lambda(lambda x: x / 2)(x), f]),
    ),
    "scaled layer": (1, (0.2,), lambda x, f, g: CustomScaleLayer(0.2)([x, f])),
    "untraced term": (1, (1,), lambda x, f, g: layers.Add()([x, Untraced()(f)])),
}


def summing(form):
    """Return a network of three sums, and their terms."""
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    parts = []
    for _ in range(3):
        parts.append((x, branch(x), branch(x, tanh=True)))
        x = form(*parts[-1])
    return keras.Model(inputs, layers.Dense(3)(x)), parts


@pytest.mark.parametrize("name", SUMS)
def test_sums_in_every_form(name):
    """Each is a shortcut plus a residual, which are those of the formula."""
    on_x, on_branches, form = SUMS[name]
    model, parts = summing(form)
    harness.randomize(model)
    images = harness.images(5, 4)
    graph = Graph(model, images)
    values = graph.run(graph.values(images))
    close(values[graph.outputs[0]], model(images))
    units = find_units(graph)
    assert len(units) == 3
    for unit, tensors in zip(units, parts, strict=True):
        x, *branches = keras.Model(model.input, tensors)(images)
        close(values[unit.shortcut], on_x * x)
        residual = sum(factor * each for factor, each in zip(on_branches, branches, strict=False))
        close(values[unit.residual], residual)
        assert graph.weights_of(unit.residual_steps) == len(on_branches)
        assert graph.weights_of(unit.shortcut_steps) == 0
    assert any(name.startswith("untraced") for name in graph.closed) == (name == "untraced term")


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_sums_in_16_bits(precision):
    images = harness.images(5, 4)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        models = {name: summing(form)[0] for name, (*_, form) in SUMS.items()}
    finally:
        keras.config.set_dtype_policy(before)
    for name, model in models.items():
        graph = Graph(model, images)
        assert len(find_units(graph)) == 3, name
        found = graph.run(graph.values(images))[graph.outputs[0]]
        np.testing.assert_allclose(found, model(images), atol=0.15, err_msg=name)


def test_sums_that_stay_as_they_are(monkeypatch):
    """Those of residual streams, where no term is without weights, and one around a chain."""
    inputs = keras.Input((4,))
    first, second = layers.Dense(4)(inputs), layers.Dense(4)(inputs)
    for _ in range(2):
        f = branch(first)
        first, second = (0.9 * first + 0.1 * second) + f, (0.1 * first + 0.9 * second) + f
    streams = keras.Model(inputs, layers.Dense(3)(first + second))
    x = layers.Dense(4)(inputs)
    inside = x + branch(x)
    chain = keras.Model(inputs, layers.Dense(3)(x + (inside + branch(inside))))
    for model in (streams, chain):
        changed = Graph(model, harness.images(5, 4))
        monkeypatch.setattr(sums, "grouped", lambda graph: [])
        steps = Graph(model, harness.images(5, 4)).steps
        monkeypatch.undo()
        assert [step.inputs for step in changed.steps] == [step.inputs for step in steps]


def masked():
    """A mask as an input."""
    tokens, mask = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    return [tokens, mask], layers.Embedding(9, 4)(tokens), ops.cast(mask, "float32")[..., None]


def masked_by_the_tokens():
    tokens = keras.Input((5,), dtype="int32")
    return [tokens], layers.Embedding(9, 4)(tokens), ops.cast(tokens != 0, "float32")[..., None]


def with_memory():
    """What an encoder has made of another input, as in the decoder of a translator."""
    tokens, others = keras.Input((5,), dtype="int32"), keras.Input((5, 4))
    return [tokens, others], layers.Embedding(9, 4)(tokens), layers.Dense(4)(others)


@pytest.mark.parametrize("make", [masked, masked_by_the_tokens, with_memory])
def test_what_else_a_branch_reads_does_not_hide_its_unit(make):
    inputs, x, side = make()
    for _ in range(3):
        f = layers.Dense(4)(layers.LayerNormalization()(x))
        x = x + layers.Dense(4)(layers.Multiply()([f, side]))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    random = np.random.default_rng(0)
    arrays = [
        random.integers(0, 9, (6, 5)) if each.dtype == "int32" else harness.images(6, 5, 4)
        for each in inputs
    ]
    units = find_units(Graph(model, arrays))
    assert [unit.shortcut == unit.start for unit in units] == [True] * 3
    assert [unit.before for unit in units[1:]] == [unit.total for unit in units[:-1]]
    result = kp.analysis.audit(model, arrays, labels=np.arange(6) % 2)
    assert (result.arrangement, result.units, result.passed) == ("pre_norm", 3, True)
