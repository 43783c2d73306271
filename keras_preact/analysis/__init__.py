"""How signals travel through residual networks: measured on the network itself, at the start and after training."""

from keras_preact.analysis.propagation import Propagation, propagation
