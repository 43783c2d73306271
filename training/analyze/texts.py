"""What the page says about each picture, whatever the network: how to read it, and what it shows for who cannot see it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Text(NamedTuple):
    """How to read a picture, and what it shows."""

    how: str
    alt: str


#: Name of a picture to its texts.
TEXTS: Mapping[str, Text] = MappingProxyType(
    {
        "unit": Text(
            "The signal comes from above; the thick line is the shortcut h, the boxes to the right are the branch F.",
            "A residual unit as a diagram.",
        ),
        "training_curves": Text(
            "Dashed: training loss, left axis; solid: error, right axis (as Fig. 1 and 6 of the paper).",
            "Lines of training loss and error by epoch.",
        ),
        "training_health": Text(
            "Green is the healthy range; lines far outside call for another learning rate, initialisation or normalisation.",
            "Lines of the figures of kp.TrainingHealth over the updates, with their healthy ranges shaded.",
        ),
        "gradient_norms": Text(
            "A flat line: the loss reaches every unit alike (Eq. 5). One that rises to the left: gradients explode on their "
            "way back; one that falls: they vanish.",
            "Line of the norm of the gradient at each depth.",
        ),
        "weight_gradients": Text(
            "How strongly each unit's kernels are asked to change; one far below the others hardly learns.",
            "Lines of the norms of the gradients of each unit's kernels.",
        ),
        "activation_norms": Text(
            "With identity shortcuts every unit adds to the signal (Eq. 4); where a stage begins its shape changes.",
            "Line of the norm of the signal at each depth.",
        ),
        "residual_ratio": Text(
            "Far above 1, a unit replaces the signal; far below, it hardly changes it.",
            "Line of the ratio of the norms of branch and shortcut, by unit.",
        ),
        "truncation": Text(
            "Above: what an activation after the addition takes out of the shortcut's signal (Sec. 4.1). Below: channels that "
            "are 0 for all images where the first weight reads.",
            "Two lines by unit: the share of the sums that is set to 0, and the share of dead channels.",
        ),
        "channels": Text(
            "A column is a depth, a row a channel, white where there is none; bright ones carry the signal on.",
            "Heat map of the mean size of every channel at every depth.",
        ),
        "gradient_split": Text(
            "The part through the shortcuts arrives unchanged from the end of a stage. The errors are of the size of rounding "
            "where shortcuts and f are identities, and of that of 1 where not.",
            "Norms of both parts of the gradient by unit, and below them the errors of Eq. 4 and 5.",
        ),
        "direct_path": Text(
            "1 everywhere with identities; a factor on the shortcut, a gate or a ReLU after the addition takes its part in "
            "every unit (Sec. 3).",
            "Lines of the share of the gradient that comes back through the shortcuts alone.",
        ),
        "path_lengths": Text(
            "A path takes the branch or the shortcut of each unit: most are about half as long as the network.",
            "Bars of the share of the paths of each length.",
        ),
        "lesions": Text(
            "An ensemble gets worse little by little as its members go; a plain network is lost without any one layer (arXiv "
            "1605.06431).",
            "Points of the error against the number of units that were taken out, and a line through their means.",
        ),
        "singular_values": Text(
            "How much the body of the network stretches small changes of one image; near 1 they keep their size (dynamical "
            "isometry).",
            "Singular values of the Jacobian in descending order, and their histogram.",
        ),
        "phases": Text(
            "A wide plain network with this activation. Blue: gradients vanish; red: they explode; the line is criticality. "
            "Shortcuts and normalisation move a network away from this map.",
            "Map of the growth of gradients over the variances of weights and biases, with this network as a point.",
        ),
        "correlation_maps": Text(
            "Above the diagonal two examples grow alike, below they grow apart; the closer a curve, the more layers it takes. "
            "Without normalisation.",
            "Curves of the correlation of two examples behind a unit over that in front of it.",
        ),
    }
)
