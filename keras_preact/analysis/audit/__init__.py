"""The audit: a checklist for residual networks, measured on any Keras model."""

import keras
import numpy as np

from keras_preact import compiled
from keras_preact.analysis import _inputs
from keras_preact.analysis.additions import no_unit
from keras_preact.analysis.audit import measure
from keras_preact.analysis.audit.causes import explained
from keras_preact.analysis.audit.checks import CHECKS
from keras_preact.analysis.audit.network import Network, named_units
from keras_preact.analysis.audit.report import Audit, AuditFinding, Status
from keras_preact.graph import Graph
from keras_preact.models.input_range import expected_input

#: Height and width of the examples for a model that takes any.
_FREE_SIZE = 64


def audit(model: keras.Model, sample=None, *, labels=None) -> Audit:
    """Check a model for mistakes that keep residual networks from training.

    Args:
        model: Any built Keras model with residual units: functional, sequential or a
            subclass that uses Keras layers and `keras.ops`. A unit may end in any sum:
            of two branches, in a `Lambda`, an average or a difference. Its branches may
            read masks and other inputs. It stays unchanged.
        sample: At least 2 input examples, preprocessed as in training; a list or a
            dictionary if the model has several inputs. None: 16 examples of noise, with
            the mean and the standard deviation that the model's preprocessing expects.
            Real examples show more.
        labels: Class numbers of shape `(batch,)`, or of the output's shape without its
            last axis. With labels, the loss is the cross-entropy, from probabilities if
            the model ends in a softmax, else from logits. Without labels, the loss is
            half the squared norm of the output, averaged over the batch.

    Returns:
        An `Audit` with one `AuditFinding` per row of
        `keras_preact.analysis.audit.checks.CHECKS`.

    The model runs at inference and in training mode, so dropout is found. The limits
    for signals, gradients and weights are made for a network before training; for a
    trained network they mean less.

    Raises:
        ValueError: if the model is not built, has no residual unit or cannot be traced;
            if the sample has fewer than 2 examples, is not finite or does not fit the
            model; if there is not one label per example, or the model has no such
            class; without a sample, if the model takes integers or several inputs.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> x = np.random.default_rng(0).normal(size=(8, 8, 8, 3))
    >>> kp.analysis.audit(kp.models.resnet_cifar(8, input_shape=(8, 8, 3)), x).passed
    True
    >>> scaled = kp.models.resnet_cifar(8, input_shape=(8, 8, 3), shortcut="constant_scaling")
    >>> finding = kp.analysis.audit(scaled, x)["identity path"]
    >>> finding.status, finding.figure, finding.locations[0]
    (<Status.FAIL: 'FAIL'>, 0.5, 'stage1_unit1')

    Source: the arrangement and shortcuts of arXiv 1603.05027.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            "The audit takes a Keras model; keras.models.load_model opens a file. Received: "
            f"{model!r}"
        )
    if not model.built:
        raise ValueError(
            f"The model {model.name!r} is not built. Call it once on a batch, then audit it."
        )
    is_noise = sample is None
    sample = _inputs.check_sample(model, _noise(model) if is_noise else sample, "sample")
    if (size := _inputs.size(sample)) < 2:
        raise ValueError(
            f"`sample` must have at least 2 examples, for batch statistics. Received: {size}"
        )
    at_inference = Graph(model, sample)
    graph = Graph(model, sample, training=True, like=at_inference)
    units = named_units(graph)
    if not units:
        raise ValueError(no_unit(graph))
    network = Network(
        graph,
        units,
        gradients=measure.gradients(model, sample, labels),
        inference=measure.measure(at_inference, named_units(at_inference), sample),
        training=measure.measure(graph, units, sample),
        is_noise=is_noise,
        problems=compiled.problems(model, sample),
    )
    findings = explained(CHECKS, [check.run(check, network) for check in CHECKS], network)
    return Audit(model.name, network.usual_arrangement, network.depth, len(units), findings)


def _noise(model: keras.Model) -> np.ndarray:
    """Return 16 examples of noise as the model expects them."""
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) != 1 or not keras.backend.is_float_dtype(inputs[0].dtype):
        raise ValueError(
            "Without `sample`, the model must have one input of floating-point numbers and know "
            f"its shape. Received: {len(inputs)} known inputs in {model.name!r}. Pass a sample"
        )
    shape = [size or _FREE_SIZE for size in inputs[0].shape[1:]]
    expected = expected_input(model)
    noise = np.moveaxis(np.random.default_rng(0).normal(size=(16, *shape)), expected.axis, -1)
    return np.moveaxis(noise * expected.std + expected.mean, -1, expected.axis).astype("float32")
