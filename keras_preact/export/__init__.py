"""Trained classifiers for serving: SavedModel directories in TensorFlow Serving's layout, ONNX and LiteRT files.

Each is compared with its model before anyone can see it.
"""

from keras_preact.export._serving_config import write_config as write_serving_config
from keras_preact.export.formats import save_litert, save_onnx
from keras_preact.export.saved_model import ExportError, save
