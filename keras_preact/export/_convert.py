"""Convert a SavedModel of plain operations to a file for another runtime.

`python -P _convert.py FORMAT SAVED_MODEL FILE METADATA.json` runs in a process of its
own: converters change loggers, write to the terminal and may end the process. It does
not need Keras.
"""

import json
import sys
import zipfile

#: The highest opset that tf2onnx 1.17 writes. ONNX Runtime reads it since 1.14 (February 2023).
OPSET = 18


def to_onnx(saved_model: str, path: str, metadata: dict) -> None:
    """Write an ONNX file with `metadata` in its metadata_props, each value as JSON."""
    import onnx
    import tensorflow as tf
    import tf2onnx
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    loaded = tf.saved_model.load(saved_model)  # must live as long as its signature
    serve = loaded.signatures["serving_default"]
    # tf2onnx freezes variables, but would turn constants from outside the function into inputs.
    graph = convert_variables_to_constants_v2(serve, aggressive_inlining=True)
    inputs = {tensor.name: "images" for tensor in graph.inputs}
    outputs = {
        tensor.name: name
        for tensor, name in zip(graph.outputs, sorted(serve.structured_outputs), strict=True)
    }
    model, _ = tf2onnx.convert.from_graph_def(
        graph.graph.as_graph_def(add_shapes=True),
        name="keras-preact",
        input_names=list(inputs),
        output_names=list(outputs),
        tensors_to_rename=inputs | outputs,
        opset=OPSET,
        custom_op_handlers={"Erfc": (_erfc, [])},
    )
    for value in (*model.graph.input, *model.graph.output):
        shape = value.type.tensor_type.shape.dim
        for size, name in zip(shape, ("batch", "height", "width"), strict=False):
            if not size.HasField("dim_value"):
                size.dim_param = name
    model.doc_string = "Written by keras-preact."
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in metadata.items()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def _erfc(context, node, _name, _arguments) -> None:
    """Replace the complementary error function, which ONNX does not have. TensorFlow's
    GELU uses it.
    """
    import numpy as np
    import tf2onnx

    one = context.make_const(tf2onnx.utils.make_name("one"), np.ones((), "float32"))
    node.type = "Erf"
    difference = context.insert_new_node_on_output("Sub", node.output[0])
    context.replace_inputs(difference, [one.output[0], node.output[0]])


def to_litert(saved_model: str, path: str, metadata: dict) -> None:
    """Write a .tflite file, followed by a ZIP archive with `metadata` in metadata.json."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(
        saved_model, signature_keys=["serving_default"]
    )
    with open(path, "wb") as file:
        file.write(converter.convert())
    # LiteRT's own tools add files to a model in this way. The interpreter reads only the model.
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("metadata.json", json.dumps(metadata, indent=2))


CONVERTERS = {"onnx": to_onnx, "litert": to_litert}


def main(name: str, saved_model: str, path: str, metadata: str) -> None:
    with open(metadata, encoding="utf-8") as file:
        CONVERTERS[name](saved_model, path, json.load(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
