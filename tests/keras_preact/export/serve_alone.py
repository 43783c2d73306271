"""Run by test_export.py in a process of its own: serves SavedModels with TensorFlow, and with no Keras to be had.

`python serve_alone.py REQUESTS.npz ANSWERS.npz PATH ...`: the requests' keys are `INDEX_OF_PATH/NAME`.
"""

import json
import sys

sys.modules["keras"] = None

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402


def operations(function) -> list[str]:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    compiled = [f"{key} {inner.signature.name}" for inner in graph.library.function for key in inner.attr if "Xla" in key]
    return sorted({*compiled, *(node.op for node in nodes)})


def refusal(serve, images) -> str:
    try:
        serve(images=tf.constant(images))
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return "none"


def describe(loaded) -> dict:
    serve = loaded.signatures["serving_default"]
    ((_, inputs), outputs) = serve.structured_input_signature, serve.structured_outputs
    shape = [2 if n is None else n for n in inputs["images"].shape]
    return {
        "signatures": list(loaded.signatures),
        "inputs": {key: [value.dtype.name, value.shape.as_list()] for key, value in inputs.items()},
        "outputs": {key: [value.dtype.name, value.shape.as_list()] for key, value in outputs.items()},
        "operations": operations(serve),
        "variables": sum(int(np.prod(variable.shape)) for variable in serve.variables),
        "wrong size": refusal(serve, np.zeros([n + 1 for n in shape], "float32")),
        "not a number": refusal(serve, np.full(shape, np.nan, "float32")),
        "no image": refusal(serve, np.zeros([0, *shape[1:]], "float32")),
    }


def main(requests: str, answers: str, *paths: str) -> None:
    models = [tf.saved_model.load(path) for path in paths]
    results = {f"{i}/description": json.dumps(describe(model)) for i, model in enumerate(models)}
    for key, images in np.load(requests).items():
        i, name = key.split("/")
        outputs = models[int(i)].signatures["serving_default"](images=tf.constant(images))
        results |= {f"{i}/{name}/{output}": value.numpy() for output, value in outputs.items()}
    np.savez(answers, **results)


main(*sys.argv[1:])
