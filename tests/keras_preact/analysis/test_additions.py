"""The residual units of a graph."""

import keras
from keras import layers, ops

import keras_preact as kp
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
