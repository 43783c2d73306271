"""Run by test_formats.py in a process of its own: converts networks in .keras files,
with one start of TensorFlow for all.

`python convert_all.py FOLDER ACTIVATION ...`: FOLDER/0.keras becomes FOLDER/0.onnx and
    FOLDER/0.tflite, and so on.
"""

import sys
from pathlib import Path

from keras_preact.export import _convert, _plain_graph
from keras_preact.export.formats import FORMATS


def main(folder: Path, activations: list[str]) -> None:
    metadata = folder / "metadata.json"
    metadata.write_text("{}")
    for i, activation in enumerate(activations):
        graph = folder / f"{i}.graph"
        _plain_graph.main(str(folder / f"{i}.keras"), activation, str(graph))
        for name, kind in FORMATS.items():
            _convert.main(name, str(graph), str(folder / f"{i}{kind.suffix}"), str(metadata))


main(Path(sys.argv[1]), sys.argv[2:])
