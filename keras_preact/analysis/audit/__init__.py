"""The audit: a checklist of what makes residual networks train, measured on any Keras model."""

import keras
import numpy as np

from keras_preact.analysis import _inputs
from keras_preact.analysis.audit import measure, structure
from keras_preact.analysis.audit.check import Evidence
from keras_preact.analysis.audit.checks import CHECKS
from keras_preact.analysis.audit.report import Audit, Finding, Status
from keras_preact.analysis.graph import Graph


def audit(model: keras.Model, sample, *, labels=None) -> Audit:
    """Check a model for what the paper and its successors found to matter, by numbers measured on a sample.

    Args:
        model: Any built Keras model with residual units: functional, sequential or a subclass made of Keras layers and
            `keras.ops`, of this package (stacked or not) or not, with images, vectors or sequences. Nothing of it changes.
        sample: Inputs as the model takes them, at least 2 examples, preprocessed as in training; a list for several inputs.
        labels: Class numbers, `(batch,)` or of the output's shape without its last axis. The gradients are then those of the
            cross-entropy, from probabilities if the model ends in a softmax, else from logits. Without, they are those of half
            the squared norm of the output, the mean over the batch.

    Returns:
        An `Audit` with a `Finding` for each row of `keras_preact.analysis.audit.checks.CHECKS`.

    The paths and the order are checked on the model as it is, at inference and in training mode, so that dropout shows. The
    sizes of signals, gradients and weights are judged as those of a model at its start; in a trained one they say less.

    Raises:
        ValueError: for a model that is not built, has no residual unit or cannot be traced; for a sample that is empty, has
            one example, is not finite, or does not fit; for labels that are not one an example.

    Example:

    >>> import numpy as np
    >>> import keras_preact as kp
    >>> from keras_preact.analysis.audit import audit
    >>> x = np.random.default_rng(0).normal(size=(8, 8, 8, 3))
    >>> audit(kp.models.resnet_cifar(8, input_shape=(8, 8, 3)), x).passed
    True
    >>> scaled = audit(kp.models.resnet_cifar(8, input_shape=(8, 8, 3), shortcut="constant_scaling"), x)
    >>> finding = scaled["identity path"]
    >>> finding.status, finding.figure, finding.locations[0]
    (<Status.FAIL: 'FAIL'>, 0.5, 'stage1_unit1')

    Source: the arrangement and shortcuts of arXiv 1603.05027.
    """
    if not model.built:
        raise ValueError(f"The model must be built, such as by a call on data. Received: {model.name!r}, not built")
    sample = _checked(model, sample)
    labels = None if labels is None else _checked_labels(labels, sample)
    graph = Graph(model, sample)
    networks = [structure.Network(each) for each in (graph, Graph(model, sample, training=True, like=graph))]
    if not networks[0].units:
        raise ValueError(
            "The audit is of residual units, two paths from one tensor that are added, with weights in one of them. "
            f"Received: {model.name!r}, in which there is none"
        )
    inference, training = (measure.measure(network, sample) for network in networks)
    network = networks[1]
    evidence = Evidence(network, inference, training, measure.gradients(model, sample, labels))
    findings = tuple(check.finding(evidence) for check in CHECKS)
    return Audit(model.name, network.usual_arrangement, network.depth, len(network.units), findings)


def _checked(model: keras.Model, sample):
    """Return the sample as arrays of the dtypes that the model takes."""
    arrays = _inputs.check_sample(model, sample, "sample")
    if len(arrays[0]) < 2:
        raise ValueError(f"`sample` must hold at least 2 examples, for batch statistics. Received: {len(arrays[0])}")
    return arrays if isinstance(sample, list | tuple) else arrays[0]


def _checked_labels(labels, sample) -> np.ndarray:
    labels = keras.ops.convert_to_numpy(labels)
    batch = len(sample[0] if isinstance(sample, list) else sample)
    if labels.ndim == 0 or len(labels) != batch or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"`labels` must be {batch} class numbers, one an example. Received: {labels.dtype} of shape {labels.shape}"
        )
    return labels
