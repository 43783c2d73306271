"""What units and shortcuts are made of: convolution, normalisation, pooling, attention."""
