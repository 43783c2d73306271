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

pytestmark = pytest.mark.backend

SIZES = [(6, 6), (7, 7), (5, 8), (1, 2)]


def run(layer, x, data_format):
    """Apply the layer to a channels-last `x`; return its output channels last, and
    check the shape it announces.
    """
    first = data_format == "channels_first"
    given = x.transpose(0, 3, 1, 2) if first else x
    y = harness.numpy(layer(given))
    assert layer.compute_output_shape(given.shape) == y.shape
    return y.transpose(0, 2, 3, 1) if first else y


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "strides"), [(1, 1), (1, 2), (3, 1), (3, 2), (3, 3), (7, 2)])
def test_convolution(kernel, strides, size, data_format):
    x = harness.images(2, *size, 3)
    layer = spatial.PaddedConv2D(4, kernel, strides=strides, data_format=data_format)
    layer.build(x.shape if data_format == "channels_last" else (2, 3, *size))
    layer.bias.assign([1.0, -2.0, 3.0, 0.5])
    y = run(layer, x, data_format)
    weight, bias = (np.array(value, "float64") for value in layer.get_weights())
    np.testing.assert_allclose(y, reference.conv(x, weight, bias, strides), 1e-4, 1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("kernel", "strides"), [(1, 1), (1, 2), (3, 2)])
def test_gradients_in_training(kernel, strides, size):
    """A convolution is linear in images and kernel: the gradient times a change is the
    convolution of the change times the cotangent.
    """
    x = harness.images(2, *size, 3)
    layer = spatial.PaddedConv2D(4, kernel, strides=strides, use_bias=False)
    layer.build(x.shape)
    (weight,) = layer.get_weights()
    cotangent = harness.images(*layer.compute_output_shape(x.shape), seed=2)
    value, on_x, on_weights = harness.value_and_grad(layer, x, cotangent, training=True)

    def product(images, kernel):
        return (reference.conv(images.astype("float64"), kernel, None, strides) * cotangent).sum()

    np.testing.assert_allclose(value, product(x, weight), 1e-4, 1e-4)
    for seed in range(3):
        change = harness.images(*x.shape, seed=seed)
        np.testing.assert_allclose((on_x * change).sum(), product(change, weight), 1e-4, 1e-4)
        change = harness.images(*weight.shape, seed=seed)
        np.testing.assert_allclose(
            (on_weights["kernel"] * change).sum(), product(x, change), 1e-4, 1e-4
        )


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow's graphs")
def test_a_kernel_of_one_pixel_is_a_convolution_at_inference():
    """Where a bias and a ReLU behind it become part of it."""
    import tensorflow as tf

    layer = spatial.PaddedConv2D(4, 1)
    layer.build((None, None, None, 3))
    kinds = {}
    for training in (True, False):
        graph = tf.function(lambda x, training=training: layer(x, training=training))
        concrete = graph.get_concrete_function(tf.TensorSpec((None, None, None, 3)))
        kinds[training] = {operation.type for operation in concrete.graph.get_operations()}
        assert concrete(tf.zeros((2, 5, 6, 3))).shape == (2, 5, 6, 4)
    wanted = {"MatMul", "Conv2D"}
    assert kinds[True] & wanted == {"MatMul"}
    assert kinds[False] & wanted == {"Conv2D"}


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of torch's memory formats")
@pytest.mark.parametrize(("kernel", "strides"), [(1, 1), (3, 1), (3, 2)])
def test_torch_copies_no_map(kernel, strides):
    from torch.utils._python_dispatch import TorchDispatchMode

    copies = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket.__name__ in ("clone", "copy_", "constant_pad_nd"):
                copies.append(tuple(args[0].shape))
            return function(*args, **kwargs or {})

    layer = spatial.PaddedConv2D(4, kernel, strides=strides)
    x = keras.ops.convert_to_tensor(harness.images(2, 8, 9, 3))
    layer(x)
    with Watch():
        layer(x)
    assert not [shape for shape in copies if shape[0] == 2]


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="of torch's memory formats")
def test_torch_copies_no_kernel(tmp_path):
    """Torch's convolution copies every kernel that is not laid as it wants it."""
    import torch

    model = kp.models.resnet_cifar(8, classes=3, input_shape=(8, 8, 3), width_factor=0.25)
    model.compile(kp.optimizers.CoupledSGD(0.1), kp.losses.SparseCategoricalCrossentropy())
    model.train_on_batch(harness.images(2, 8, 8, 3), np.array([0, 1]))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for network in (model, loaded):
        kernels = [weight.value for weight in network.weights if len(weight.shape) == 4]
        assert len(kernels) == 7
        for kernel in kernels:
            assert kernel.permute(3, 2, 0, 1).is_contiguous(memory_format=torch.channels_last)
            assert kernel.grad is None or kernel.grad.stride() == kernel.stride()
        weights = network.trainable_variables
        for weight, velocity in zip(weights, network.optimizer.momentums, strict=True):
            assert weight.value.stride() == velocity.value.stride()
            assert (velocity.value != 0).any()


@pytest.mark.parametrize("strides", [1, 2, 3])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_zero_padding_takes_single_pixels(size, data_format, strides):
    x = harness.images(2, *size, 3)
    padded = run(ZeroPad(5, strides, data_format), x, data_format)
    np.testing.assert_array_equal(padded[..., :3], x[:, ::strides, ::strides])
    assert not padded[..., 3:].any()


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_max_pooling_of_negative_values(size, data_format):
    x = -1 - np.abs(harness.images(2, *size, 3))
    layer = spatial.PaddedMaxPooling2D(3, 2, data_format=data_format)
    np.testing.assert_array_equal(run(layer, x, data_format), reference.max_pool(x, 3, 2))


@pytest.mark.parametrize("strides", [1, 2, 3])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_max_pooling_of_pairs(size, data_format, strides):
    x = -1 - np.abs(harness.images(2, *size, 3))
    layer = spatial.PaddedMaxPooling2D(2, strides, data_format=data_format)
    want = reference.max_of_pairs(x, strides)
    np.testing.assert_array_equal(run(layer, x, data_format), want)
    assert layer.compute_output_shape((2, None, 5, 3))[1] is None


def test_unknown_sizes():
    unknown = (None, None, None, 3)
    assert spatial.PaddedConv2D(4, 3, strides=2).compute_output_shape(unknown) == (
        None,
        None,
        None,
        4,
    )
    assert spatial.PaddedMaxPooling2D(3, 2).compute_output_shape(unknown) == unknown


@pytest.mark.parametrize("strides", [1, 2])
def test_config_round_trip(strides):
    layer = spatial.PaddedConv2D(4, 3, strides=strides, groups=2, use_bias=False)
    copy = spatial.PaddedConv2D.from_config(layer.get_config())
    x = harness.images(2, 6, 6, 2)
    layer.build(x.shape)
    copy.build(x.shape)
    copy.set_weights(layer.get_weights())
    np.testing.assert_array_equal(harness.numpy(copy(x)), harness.numpy(layer(x)))
