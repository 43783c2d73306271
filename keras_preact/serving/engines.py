"""The engines that compute the networks of a server. All of them run the same frozen
graph.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_preact.export.version import Frozen
from keras_preact.serving.settings import Settings

Engine = Callable[[np.ndarray], dict[str, np.ndarray]]

log = logging.getLogger(__name__)


def use_threads(threads: int | None) -> None:
    """Set the number of threads of TensorFlow, which all models of a process share.
    None: one per core.

    TensorFlow accepts the number only before its first computation. Afterwards this
    function logs a warning and changes nothing.
    """
    import tensorflow as tf

    options = tf.config.threading
    if threads is None or threads == options.get_intra_op_parallelism_threads():
        return
    try:
        options.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        log.warning(
            "TensorFlow is already in use: its number of threads does not change to %d.", threads
        )


def tensorflow(frozen: Frozen, settings: Settings, precision: str) -> Engine:
    """Compute with TensorFlow: in the precision that the graph has, with the threads of
    `use_threads`.
    """
    import tensorflow as tf

    if frozen.int8 is not None:
        log.warning(
            "The engine 'tensorflow' computes %s in float32: only the engine 'openvino' computes "
            "it in 8 bits.",
            frozen.int8.parents[2].name,
        )

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        tensors = frozen.function(tf.constant(images))
        return {name: tensor.numpy() for name, tensor in zip(frozen.outputs, tensors, strict=True)}

    return run


def openvino(frozen: Frozen, settings: Settings, precision: str) -> Engine:
    """Compute with OpenVINO on the CPU: in 8 bits from `frozen.int8`, otherwise the
    graph, in float32 or bfloat16.
    """
    import openvino as ov

    options: dict[str, Any] = {
        # By default OpenVINO computes float32 networks in bfloat16 on CPUs on which this is faster.
        # In an 8-bit network the hint concerns the few layers that are not in 8 bits.
        "INFERENCE_PRECISION_HINT": "f32" if precision == "float32" else "bf16",
        # All threads compute one batch: the batcher runs batches one after another.
        "PERFORMANCE_HINT": "LATENCY",
    }
    if settings.threads is not None:
        options["INFERENCE_NUM_THREADS"] = settings.threads
    # The graph itself is not kept: OpenVINO has its own copy of the weights.
    model = ov.Core().read_model(frozen.int8) if frozen.int8 else frozen.openvino_model()
    # one request object is enough: the batcher has one thread
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        request.infer([images], share_inputs=True)
        return {name: request.get_tensor(name).data.copy() for name in frozen.outputs}

    return run


ENGINES: Mapping[str, Callable[[Frozen, Settings, str], Engine]] = {
    "tensorflow": tensorflow,
    "openvino": openvino,
}
