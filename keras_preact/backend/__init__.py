"""What differs between TensorFlow, JAX and PyTorch: loops over layers, gradients, kernels."""
