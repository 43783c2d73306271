"""Image data sets as tf.data, and what happens to the images on their way to the network."""

from training.data.pipelines import evaluation_batches, training_batches
from training.data.sources import SOURCES, ImageData, Split, load
