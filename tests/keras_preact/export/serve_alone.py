"""Run by test_export.py in a process of its own: serves SavedModels with TensorFlow,
and with no Keras to be had.

`python serve_alone.py REQUESTS.npz ANSWERS.npz PATH ...`: the requests' keys are
    `INDEX_OF_PATH/NAME`.
"""

import json
import sys

sys.modules["keras"] = None

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from tensorflow_serving.apis.prediction_log_pb2 import PredictionLog  # noqa: E402


def operations(function) -> list[str]:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    compiled = [
        f"{key} {inner.signature.name}"
        for inner in graph.library.function
        for key in inner.attr
        if "Xla" in key
    ]
    return sorted({*compiled, *(node.op for node in nodes)})


def refusal(serve, images) -> str:
    try:
        serve(images=tf.constant(images))
    except tf.errors.InvalidArgumentError as error:
        return error.message
    return "none"


def describe(loaded, path) -> dict:
    signatures = loaded.signatures
    specs = signatures["serving_default"].structured_input_signature[1]
    shape = [2 if n is None else n for n in specs["images"].shape]
    wrong = {
        "wrong size": np.zeros([n + 1 for n in shape], "float32"),
        "not a number": np.full(shape, np.nan, "float32"),
        "no image": np.zeros([0, *shape[1:]], "float32"),
    }
    takes_images = [name for name in signatures if name != "predict_bytes"]
    return {
        "signatures": {
            name: [
                {key: [value.dtype.name, value.shape.as_list()] for key, value in side.items()}
                for side in (serve.structured_input_signature[1], serve.structured_outputs)
            ]
            for name, serve in signatures.items()
        },
        "operations": sorted({op for serve in signatures.values() for op in operations(serve)}),
        "network": operations(signatures["serving_default"]),
        "variables": sum(
            int(np.prod(variable.shape)) for variable in {id(v): v for v in loaded.weights}.values()
        ),
        "refused": {
            key: {name: refusal(signatures[name], images) for name in takes_images}
            for key, images in wrong.items()
        },
        "warmed up": [warm_up(signatures, *request) for request in requests_in(path)],
    }


def requests_in(path):
    for record in tf.data.TFRecordDataset(
        f"{path}/assets.extra/tf_serving_warmup_requests"
    ).as_numpy_iterator():
        request = PredictionLog.FromString(record).predict_log.request
        yield (
            request.model_spec.signature_name,
            {key: tf.make_ndarray(value) for key, value in request.inputs.items()},
        )


def warm_up(signatures, name, inputs) -> tuple[str, int]:
    outputs = signatures[name](**{key: tf.constant(value) for key, value in inputs.items()})
    (n,) = {len(value) for value in outputs.values()}
    return name, n


def main(requests: str, answers: str, *paths: str) -> None:
    models = [tf.saved_model.load(path) for path in paths]
    results = {
        f"{i}/description": json.dumps(describe(*pair))
        for i, pair in enumerate(zip(models, paths, strict=True))
    }
    files: dict[str, list[bytes]] = {}
    for key, values in np.load(requests).items():
        i, name = key.split("/")
        if name.startswith("file"):
            files.setdefault(i, []).append(values.tobytes())
            continue
        for signature in ("serving_default", "features"):
            outputs = models[int(i)].signatures[signature](images=tf.constant(values))
            results |= {f"{i}/{name}/{output}": value.numpy() for output, value in outputs.items()}
    for i, contents in files.items():
        outputs = models[int(i)].signatures["predict_bytes"](image_bytes=tf.constant(contents))
        results |= {f"{i}/files/{output}": value.numpy() for output, value in outputs.items()}
        results[f"{i}/files/classes"] = results[f"{i}/files/classes"].astype(str)
        results[f"{i}/files/decoded"] = models[int(i)].decode(tf.constant(contents)).numpy()
    np.savez(answers, **results)


main(*sys.argv[1:])
