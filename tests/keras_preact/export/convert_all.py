"""Run by test_runtimes.py in a process of its own: converts networks in .keras files,
with one start of TensorFlow for all.

`python convert_all.py FOLDER PLAN ...`: FOLDER/0.keras becomes FOLDER/0.onnx and
FOLDER/0.tflite, and so on.
"""

import sys
from pathlib import Path

from keras_preact.export import _convert, _graph
from keras_preact.export.runtimes import TARGETS


def main(folder: Path, plans: list[str]) -> None:
    metadata = folder / "metadata.json"
    metadata.write_text("{}")
    for i, plan in enumerate(plans):
        graph = folder / f"{i}.graph"
        _graph.main(str(folder / f"{i}.keras"), plan, str(graph))
        for name, target in TARGETS.items():
            _convert.main(name, str(graph), str(folder / f"{i}{target.suffix}"), str(metadata))


main(Path(sys.argv[1]), sys.argv[2:])
