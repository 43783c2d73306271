"""Image data sets as tf.data, and what happens to the images on their way to the network."""

from training.data.images import evaluation_batches
from training.data.pipelines import TrainingStream, training_stream
from training.data.sources import SOURCES, ImageData, Split, load
