"""Run an exported model as a server or a device does, without Keras.

`python -P _replay.py RUNTIME MODEL INPUTS.npz OUTPUTS.npz` reads batches by name and
writes `NAME/OUTPUT` for each output.
"""

import gc
import sys
from collections.abc import Callable

import numpy as np


def _saved_model(path: str) -> Callable:
    import tensorflow as tf

    loaded = tf.saved_model.load(path)  # must live as long as its signature
    return lambda images: {
        name: value.numpy()
        for name, value in loaded.signatures["serving_default"](images=tf.constant(images)).items()
    }


def _onnx(path: str) -> Callable:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda images: dict(zip(names, session.run(names, {"images": images}), strict=True))


def _litert(path: str) -> Callable:
    from ai_edge_litert.interpreter import Interpreter

    serve = Interpreter(model_path=path).get_signature_runner("serving_default")
    return lambda images: serve(images=images)


def _int8(path: str) -> Callable:
    import openvino as ov

    options = {"INFERENCE_PRECISION_HINT": "bf16"}  # as in the server's engine
    compiled = ov.Core().compile_model(path, "CPU", options)

    def serve(images: np.ndarray) -> dict[str, np.ndarray]:
        outputs = compiled([images])
        return {name: outputs[name] for name in ("logits", "probabilities", "features")}

    return serve


#: Name to a function that loads a model and returns the function from images to named outputs.
RUNTIMES = {"saved_model": _saved_model, "onnx": _onnx, "litert": _litert, "int8": _int8}


def main(runtime: str, path: str, inputs: str, outputs: str) -> None:
    sys.modules["keras"] = None  # type: ignore[assignment]  # from here on importing it fails
    serve = RUNTIMES[runtime](path)
    results: dict = {}
    with np.load(inputs) as batches:
        for name, images in batches.items():
            results |= {f"{name}/{key}": value for key, value in serve(images).items()}
    np.savez(outputs, **results)


if __name__ == "__main__":
    gc.disable()  # it takes a fifth of the time of TensorFlow's import, and this process is short
    main(*sys.argv[1:])
