"""Export trained classifiers: SavedModels in TensorFlow Serving's layout, ONNX and
LiteRT files.

An export appears only after its outputs matched the model's.
"""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keras_preact.export._children import ExportError
    from keras_preact.export.runtimes import save_litert, save_onnx
    from keras_preact.export.saved_model import save
else:
    #: Name to its module, imported at first use: the server reads exports without Keras.
    _LATER = MappingProxyType(
        {
            "save_litert": "runtimes",
            "save_onnx": "runtimes",
            "ExportError": "_children",
            "save": "saved_model",
        }
    )

    def __getattr__(name: str):
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_LATER[name]}")
        value = globals()[name] = getattr(module, name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER})
