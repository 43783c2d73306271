"""Strided layers pad symmetrically on every backend, as Torch does and `padding="same"`
does not.
"""

import keras
import numpy as np
import pytest

import keras_preact as kp
from keras_preact.layers import spatial
from keras_preact.shortcuts import ZeroPad
from tests import reference
from tests.keras_preact import harness

FORMATS = ["channels_last", "channels_first"]


def run(layer, x, data_format, training=None):
    """Apply the layer to a channels-last `x`; return its output channels last, and
    check the shape it announces.
    """
    first = data_format == "channels_first"
    given = x.transpose(0, 3, 1, 2) if first else x
    y = harness.numpy(layer(given, training=training) if training else layer(given))
    assert layer.compute_output_shape(given.shape) == y.shape
    return y.transpose(0, 2, 3, 1) if first else y


@pytest.mark.backend
@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("size", [(6, 6), (5, 8), (1, 2)], ids=str)
@pytest.mark.parametrize(("kernel", "strides"), [(1, 1), (1, 2), (3, 2), (3, 3), (7, 2)])
def test_convolution(kernel, strides, size, data_format):
    x = harness.images(2, *size, 3)
    layer = spatial.PaddedConv2D(4, kernel, strides=strides, data_format=data_format)
    layer.build(x.shape if data_format == "channels_last" else (2, 3, *size))
    layer.bias.assign([1.0, -2.0, 3.0, 0.5])
    weight, bias = (np.array(value, "float64") for value in layer.get_weights())
    for training in (False, True):
        y = run(layer, x, data_format, training)
        np.testing.assert_allclose(y, reference.conv(x, weight, bias, strides), 1e-4, 1e-5)


def test_a_kernel_of_one_pixel_is_a_convolution_at_inference():
    """At inference, a bias and a ReLU are fused with a convolution."""
    tf = pytest.importorskip("tensorflow")
    layer = spatial.PaddedConv2D(4, 1)
    layer.build((None, None, None, 3))
    for training, wanted in ((True, {"MatMul"}), (False, {"Conv2D"})):
        graph = tf.function(lambda x, training=training: layer(x, training=training))
        concrete = graph.get_concrete_function(tf.TensorSpec((None, None, None, 3)))
        kinds = {operation.type for operation in concrete.graph.get_operations()}
        assert kinds & {"MatMul", "Conv2D"} == wanted
        assert concrete(tf.zeros((2, 5, 6, 3))).shape == (2, 5, 6, 4)


@pytest.mark.backend
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of torch's memory formats")
@pytest.mark.parametrize("kind", ["CoupledSGD", "AdamW", "Lion", "Muon"])
def test_torch_copies_no_kernel(kind):
    """Torch's convolution copies every kernel that does not have its memory layout, and an
    update of all weights at once is slow if a momentum does not have it.
    """
    import torch

    model = kp.models.resnet_cifar(8, classes=3, input_shape=(8, 8, 3), width_factor=0.25)
    harness.compiled(model, optimizer := getattr(kp.optimizers, kind)(0.1))
    model.train_on_batch(harness.images(2, 8, 8, 3), np.array([0, 1]))
    kernels = [weight.value for weight in model.weights if len(weight.shape) == 4]
    assert len(kernels) == 7
    for kernel in kernels:
        assert kernel.permute(3, 2, 0, 1).is_contiguous(memory_format=torch.channels_last)
        assert kernel.grad is None or kernel.grad.stride() == kernel.stride()
    moments = [each.value for each in optimizer.variables if len(each.shape) == 4]
    assert len(moments) >= len(kernels)
    layouts = {(kernel.shape, kernel.stride()) for kernel in kernels}
    assert {(moment.shape, moment.stride()) for moment in moments} == layouts


@pytest.mark.backend
@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize(
    ("size", "strides"), [((6, 6), 1), ((5, 8), 1), ((5, 8), 2), ((7, 7), 3), ((1, 2), 2)], ids=str
)
def test_maxima_and_zeros(size, strides, data_format):
    """The values are negative: zeros as padding would be larger."""
    x = -1 - np.abs(harness.images(2, *size, 3))
    pairs = run(spatial.PaddedMaxPooling2D(2, strides, data_format=data_format), x, data_format)
    np.testing.assert_array_equal(pairs, reference.max_of_pairs(x, strides))
    if strides == 2:
        y = run(spatial.PaddedMaxPooling2D(3, 2, data_format=data_format), x, data_format)
        np.testing.assert_array_equal(y, reference.max_pool(x, 3, 2))
    padded = run(ZeroPad(5, strides, data_format), x, data_format)
    np.testing.assert_array_equal(padded[..., :3], x[:, ::strides, ::strides])
    assert not padded[..., 3:].any()


def test_unknown_sizes():
    unknown = (None, None, None, 3)
    assert spatial.PaddedConv2D(4, 3, strides=2).compute_output_shape(unknown) == (
        *unknown[:3],
        4,
    )
    assert spatial.PaddedMaxPooling2D(3, 2).compute_output_shape(unknown) == unknown
    assert spatial.PaddedMaxPooling2D(2, 2).compute_output_shape(unknown) == unknown
