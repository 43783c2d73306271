"""SavedModel directories in TensorFlow Serving's layout, checked before anyone can see them."""

from keras_preact.export.saved_model import ExportError, save
