"""Torch's networks that ours are compared with: drawn anew, and run on images with the
channels last.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch")


def randomized(net, seed=0):
    """The network with every weight and statistic drawn anew, ready for inference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if name.endswith("running_var") or (name.endswith("weight") and tensor.ndim == 1):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.ndim == 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
            elif tensor.ndim:
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator) * (2 / tensor[0].numel()) ** 0.5
                )
    return net.eval()


def theirs_on(net, images):
    with torch.no_grad():
        return net(torch.tensor(np.moveaxis(images, -1, 1))).numpy()
