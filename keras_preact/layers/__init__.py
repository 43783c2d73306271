"""The layers of units and shortcuts: convolution, normalisation, pooling, attention."""
