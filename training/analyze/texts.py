"""What the page says about each picture of any network: how to read it, and what it
shows to readers who cannot see it.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Text(NamedTuple):
    """How to read a picture, and what it shows."""

    how: str
    alt: str


#: The picture at the top of a page, if no finding of the audit has another one.
MAIN = "gradient_norms"
#: Check of the audit to the picture that shows what it found.
SHOWN_BY: Mapping[str, str] = {
    "identity path": "gradient_norms",
    "activation after addition": "truncation",
    "branch order": "unit",
    "final activation": "activation_norms",
    "gradient of the weights": "weight_gradients",
    "signal growth": "activation_norms",
    "dead channels": "truncation",
}

#: Picture to the check of the audit that compares the same within one shape.
WITHIN_SHAPES: Mapping[str, str] = {
    "gradient_norms": "gradient of the signal",
    "weight_gradients": "gradient of the weights",
    "activation_norms": "signal growth",
}

#: Name of a picture to its texts.
TEXTS: Mapping[str, Text] = {
    "unit": Text(
        "The thick line is the shortcut h, the boxes at its right are the branch F. The "
        "signal flows downwards.",
        "A residual unit as a diagram.",
    ),
    "training_curves": Text(
        "As Fig. 1 and 6 of the paper.",
        "Lines of the training loss (left) and of the error (right) by epoch.",
    ),
    "training_health": Text(
        "Green is the healthy range. A line far outside calls for another learning rate, "
        "initialisation or normalisation.",
        "Lines of the figures of kp.TrainingHealth over the updates, with their healthy "
        "ranges shaded.",
    ),
    "gradient_norms": Text(
        "A flat line means that the gradient reaches every unit alike (Eq. 5). Norms of "
        "different shapes do not compare.",
        "Line of the norm of the gradient at each depth.",
    ),
    "weight_gradients": Text(
        "A kernel with a far smaller gradient than the others hardly learns.",
        "Lines of the norms of the gradients of the kernels of each unit.",
    ),
    "activation_norms": Text(
        "With identity shortcuts every unit adds to the signal (Eq. 4). A stage begins with "
        "a signal of another shape.",
        "Line of the norm of the signal at each depth.",
    ),
    "residual_ratio": Text(
        "Far above 1, a unit replaces the signal; far below, it hardly changes it.",
        "Line of the ratio of the norms of branch and shortcut, by unit.",
    ),
    "truncation": Text(
        "Above: what an activation after the addition removes from the signal of the "
        "shortcut (Sec. 4.1). Below: channels that are 0 for all images where the first "
        "weight of a unit reads.",
        "Two lines by unit: the share of the sums that is set to 0, and the share of dead "
        "channels.",
    ),
    "channels": Text(
        "A column is a depth, a row is a channel. Bright channels carry the signal; white "
        "means that there is no channel.",
        "Heat map of the mean size of every channel at every depth.",
    ),
    "gradient_split": Text(
        "The part through the shortcuts comes unchanged from the end of a stage. If "
        "shortcuts and f are identities, the errors are rounding (below 1e-5); if not, they "
        "reach the size of 1.",
        "Norms of both parts of the gradient by unit, and below them the errors of Eq. 4 and 5.",
    ),
    "direct_path": Text(
        "Identity shortcuts return all of it. A factor on the shortcut, a gate, or a ReLU "
        "after the addition removes a part in every unit (Sec. 3).",
        "Lines of the share of the gradient that returns through the shortcuts alone.",
    ),
    "path_lengths": Text(
        "A path takes the branch or the shortcut of each unit: most paths are about half as "
        "long as the network.",
        "Bars of the share of the paths of each length.",
    ),
    "lesions": Text(
        "An ensemble gets worse little by little as it loses members. A plain network fails "
        "without any one layer (arXiv 1605.06431).",
        "Points of the error against the number of removed units, and a line through their means.",
    ),
    "singular_values": Text(
        "They say how much the units after the first stretch small changes of one image. "
        "Near 1, changes keep their size (dynamical isometry).",
        "Singular values of the Jacobian in descending order, and their histogram.",
    ),
    "depth_scales": Text(
        "The curve is that of a wide plain network with this activation, without biases. "
        "At its peak, criticality, gradients keep their size over any depth; left of it they "
        "vanish, right of it they explode. Shortcuts and normalisation move a network away "
        "from this curve.",
        "Curve of the number of layers over which gradients keep their size, against the "
        "variance of the weights, with a line at this network's variance.",
    ),
}
