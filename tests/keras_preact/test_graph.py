"""The graph of a model computes the model's values."""

import keras
import pytest
from keras import layers, ops

import keras_preact as kp
from keras_preact.analysis.additions import find_units
from keras_preact.graph import Graph
from tests.keras_preact import harness
from tests.keras_preact.harness import images, randomize

IMAGES = images(4, 8, 8, 3)


def close(got, want):
    harness.close(ops.convert_to_numpy(got), ops.convert_to_numpy(want), 1e-5)


class Block(keras.Layer):
    """A residual unit as a subclass of Layer: it reshapes by the shape of its input, and
    has dropout in training.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.dropout = layers.Dense(6, name="dense"), layers.Dropout(0.5)

    def build(self, shape):
        self.dense.build((shape[0], 6))

    def call(self, x, training=None):
        y = ops.reshape(x, (ops.shape(x)[0], -1))
        y = self.dense(ops.relu(y))
        if training:
            y = self.dropout(y, training=True)
        return x + ops.reshape(y, ops.shape(x))


class Gate(keras.Layer):
    """A product of two layers with the same name, of which one also reads the other's
    input.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(3, name="dense"), layers.Dense(3, name="dense")

    def build(self, shape):
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.first(x) * ops.sigmoid(self.second(ops.relu(x) + x)) + x


def gates():
    inputs = keras.Input((2, 3))
    return keras.Model(inputs, Gate(name="second")(Gate(name="first")(inputs)))


def blocks():
    inputs = keras.Input((2, 3))
    return keras.Model(inputs, Block(name="second")(Block(name="first")(inputs)))


def network(depth, **options):
    model = kp.models.resnet_cifar(depth, input_shape=(8, 8, 3), width_factor=0.25, **options)
    randomize(model)
    return model


MODELS = {
    "units": lambda: (network(8, downsampling="blur", squeeze_excitation=4), IMAGES),
    "stacks": lambda: (network(20, stacked=True, shortcut="shortcut_only_gating"), IMAGES),
    "subclass": lambda: (blocks(), images(5, 2, 3)),
    "same names": lambda: (gates(), images(5, 2, 3)),
}
# the gate and the projection of a unit have a layer `conv` each
for shortcut in kp.SHORTCUTS:
    MODELS[f"{shortcut}, projected"] = lambda shortcut=shortcut: (
        network(8, shortcut=shortcut, shape_shortcut="projection"),
        IMAGES,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.backend if name == "stacks" else ()) for name in MODELS],
)
def test_the_steps_compute_what_the_model_does(name):
    model, x = MODELS[name]()
    randomize(model)
    graph = Graph(model, x)
    close(graph.run(graph.values(x))[graph.outputs[0]], model(x))
    values = graph.values(x)
    assert list(graph.walk(values, until={})) == list(range(len(graph.steps)))
    assert values.keys() == set(graph.outputs)
    close(values[graph.outputs[0]], model(x))


def test_a_walk_keeps_what_is_needed_and_no_more():
    model, x = MODELS["units"]()
    graph = Graph(model, x)
    unit = find_units(graph)[1]
    most = 0
    values = graph.values(x)
    for i in graph.walk(values, until={unit.start: len(graph.steps) - 1}):
        most = max(most, len(values))
        assert (unit.start in values) == (i >= graph.producers[unit.start])
    assert most <= 5  # the tensors of both paths, and the one that `until` keeps


@pytest.mark.parametrize(("training", "drops"), [(False, []), (True, [{"training": True}] * 2)])
def test_training_is_that_of_the_graph(training, drops):
    model, x = MODELS["subclass"]()
    before = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    graph = Graph(model, x, training=training)
    assert [step.kwargs for step in graph.steps if step.kind == "Dropout"] == drops
    # tracing leaves no new nodes in the layers
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == before


def test_dominators_are_those_of_the_definition():
    """A tensor dominates another one if every path to the other one leads through it."""
    inputs = keras.Input((4,))
    a = layers.Dense(4)(inputs)
    b, c = layers.Dense(4)(a), layers.Dense(4)(a)
    d = layers.Add()([b, c])
    e = layers.Add()([d, layers.Dense(4)(layers.Concatenate()([d, b]))])
    x = images(2, 4)
    graph = Graph(keras.Model(inputs, layers.Dense(1)(e)), x)

    def reached(without):
        found = {tensor for tensor in graph.inputs if tensor != without}
        for step in graph.steps:
            if found & set(step.inputs):
                found |= set(step.outputs) - {without}
        return found

    everything = range(len(graph.specs))
    for tensor in everything:
        strict = {other for other in everything if other != tensor and tensor not in reached(other)}
        chain, at = [], graph.dominators[tensor]
        while at is not None:
            chain.append(at)
            at = graph.dominators[at]
        assert set(chain) == strict
    [unit] = [unit for unit in find_units(graph) if unit.step == len(graph.steps) - 2]
    assert (unit.start, unit.shortcut_steps) == (graph.steps[0].outputs[0], (1, 2, 3))


#: What a layer computes from its variable and its input.
FORMULAS = {
    "product": lambda v, x: v * x,
    "sum": lambda v, x: v + x - v,
    "difference": lambda v, x: v - x,
    "quotient": lambda v, x: v / (1 + x * x),
    "power": lambda v, x: v ** ops.sigmoid(x),
    "rest": lambda v, x: (1.0 - v) * x,
}


@pytest.mark.backend
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_variables_on_the_left_of_an_operator(formula):
    class Factor(keras.Layer):
        def build(self, shape):
            self.factor = self.add_weight(shape=(1,), initializer="ones", name="factor")

        def call(self, x):
            return formula(self.factor, x)

    class Formula(kp.shortcuts.Shortcut):
        def layers(self, site):
            return [Factor()]

        def paths(self, x, residual, transformed):
            return transformed, residual

    model = network(8, shortcut=Formula())
    graph = Graph(model, IMAGES)
    values = graph.run(graph.values(IMAGES))
    harness.close(harness.numpy(values[graph.outputs[0]]), harness.numpy(model(IMAGES)), 1e-4)
    kp.analysis.audit(model)


def test_a_model_that_looks_at_values_cannot_be_traced():
    class Looking(keras.Layer):
        def call(self, x):
            return x if float(ops.sum(x)) > 0 else -x

    message = harness.error_of(lambda: Graph(Looking(name="looking"), images(2, 3)))
    assert "'looking' (Looking) cannot be traced" in message
    assert "\n" not in message
