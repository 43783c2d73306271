"""Any valid combination of options builds, infers its output shape, survives its config,
and computes the values of the NumPy reference.
"""

import inspect
from typing import Unpack

import keras
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import keras_preact as kp
from keras_preact.models.network_options import NetworkOptions, TransformerOptions
from tests import reference
from tests.keras_preact import harness

pytestmark = pytest.mark.backend

THOROUGHLY = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def every(options):
    return st.sampled_from(list(options))


UNIT_OPTIONS = {
    "arrangement": every(kp.ARRANGEMENTS),
    "shortcut": every(kp.SHORTCUTS),
    "shape_shortcut": every(["auto", "projection", "zero_pad"]),
    "activate_shape_shortcut": st.booleans(),
    "normalization": every(["batch", "layer", "group", "rms", "none"]),
    "activation": every(reference.ACTIVATIONS),
}
#: Options that the NumPy unit does not have: they change no output at inference, or only the
#: weights.
SILENT_OPTIONS = {
    "use_bias": st.booleans(),
    "dropout": every([0.0, 0.5]),
    "dropout_at": st.just("before_addition"),
    "dropout_varies": st.booleans(),
    "kernel_initializer": every([None, "he_normal"]),
}


@st.composite
def units(draw):
    """Draw filters, shape of the input, options of both units, and options that only the
    library's unit has.
    """
    block = draw(every(reference.KERNELS))
    filters = 4
    options = {"block": block} | {key: draw(values) for key, values in UNIT_OPTIONS.items()}
    silent = {key: draw(values) for key, values in SILENT_OPTIONS.items()}
    channels = draw(every([filters * reference.EXPANSION[block], 3]))
    if block == "dense":
        return filters, (3, channels), options, silent
    options["strides"] = draw(st.integers(1, 2))
    if block == "bottleneck":
        options["groups"] = draw(st.integers(1, 2))
        options["stride_on"] = draw(every(["first", "3x3"]))
    return (
        filters,
        (2, *draw(every([(5, 4), (2, 1)])), channels),
        options,
        silent,
    )  # JAX compiles for each shape


@THOROUGHLY
@given(units())
def test_units(drawn):
    filters, shape, options, silent = drawn
    shape = harness.with_streams(shape, options["shortcut"])
    x = harness.images(*shape)
    unit = harness.unit_on(x, filters, **options, **silent)
    y = harness.numpy(unit(x))
    assert y.shape == unit.compute_output_shape(shape)
    np.testing.assert_allclose(y, harness.reference_of(unit, **options)(x), 1e-3, 1e-3)
    copy = kp.ResidualUnit.from_config(unit.get_config())
    copy.build(shape)
    assert harness.paths(copy) == harness.paths(unit)


@THOROUGHLY
@given(
    st.fixed_dictionaries(UNIT_OPTIONS),
    st.fixed_dictionaries(SILENT_OPTIONS),
    every(["3x3", "dense"]),
    every(["basic", "bottleneck", "single"]),
    every(
        [[(2, 2, 1)], [(4, 1, 2)], [(2, 1, 1), (4, 2, 2)], [(4, 1, 2), (2, 1, 1)]]
    ),  # the last one narrows
)
def test_networks(options, silent, stem, block, stages):
    if stem == "dense":
        block, stages, shape = "dense", [(filters, units, 1) for filters, units, _ in stages], (5,)
    else:
        shape = (6, 7, 3)
    assume(options["shape_shortcut"] != "zero_pad" or stages[0][0] <= stages[-1][0])
    model = kp.models.ResidualNetwork(
        stages,
        stem=stem,
        stem_filters=2,
        block=block,
        input_shape=shape,
        classes=3,
        **options,
        **silent,
    )
    harness.randomize(model)
    x = harness.images(2, *shape)
    y = harness.numpy(model(x))
    expected = reference.Network(harness.weights(model), stages, stem, block, options)
    np.testing.assert_allclose(y, expected(x), 1e-2, 1e-2)
    copy = kp.models.ResidualNetwork.from_config(model.get_config())
    assert harness.paths(copy) == harness.paths(model)


def parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_builders_list_the_options_that_they_take():
    """Editors and type checkers see them in the signature."""
    fixed, of_tokens = {"block", "classes", "input_shape", "stem"}, {"num_heads", "causal"}
    assert set(NetworkOptions.__annotations__) == kp.models.option_names() - fixed - of_tokens
    taken = parameters(kp.models.TransformerNetwork) | parameters(kp.TransformerUnit)
    explicit = parameters(kp.models.transformer) - {"options"}
    assert set(TransformerOptions.__annotations__) == taken - explicit - {"unit_options", "kwargs"}
    for name, builder in inspect.getmembers(kp.models, inspect.isfunction):
        options = builder.__annotations__.get("options")
        assert options in (None, Unpack[NetworkOptions], Unpack[TransformerOptions]), name


@pytest.mark.parametrize("method", ["compile", "fit", "evaluate", "predict"])
def test_methods_have_the_signatures_of_keras(method):
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(function).parameters.values()]
        for function in (getattr(kp.models.ResidualNetwork, method), getattr(keras.Model, method))
    )
    assert ours == theirs
