"""The checks of an audit as a table: figure, limits, why it matters and what to do."""

from keras_preact.analysis.audit import order, sizes
from keras_preact.analysis.audit.check import Check, Limits
from keras_preact.preprocessing import LARGEST_SIZE, SMALLEST_STD

INFINITY = float("inf")
PAPER = "arXiv 1603.05027"

#: The checks in order. Limits are rules of thumb, except the limits of exact figures.
CHECKS: tuple[Check, ...] = (
    Check(
        "identity path",
        order.identity_path,
        "largest relative change by a shortcut",
        Limits((0, 1e-5), (0, 1e-5)),  # rounding, if a layer casts
        "Factors on the identity path, dropout among them, multiply over all units, so signals "
        "and gradients shrink or grow with the depth.",
        "Add the previous sum unchanged. Remove scaling, gates, convolutions, dropout, "
        "normalisations and activations from the identity path, or move them into the branch.",
        f"{PAPER}, Eq. 6 to 8, Sec. 3.1 and Table 1; for streams {order.STREAMS_PAPER}, Sec. 3.1",
    ),
    Check(
        "activation after addition",
        order.activation_after_addition,
        "mean share of values changed",
        Limits((0, 0), (0, 1)),
        "A ReLU after the addition blocks gradients wherever the sum is negative. The effect "
        "grows with the depth.",
        order.FULL_PREACTIVATION,
        f"{PAPER}, Sec. 4 and Fig. 4",
        same_cause_as=("identity path",),
    ),
    Check(
        "branch order",
        order.branch_order,
        "share of units not pre-activated",
        Limits((0, 0), (0, 1)),
        "Full pre-activation (normalisation, activation, weight) is the best order in the paper.",
        "Put a normalisation, then an activation, right before each weight layer of the branch. "
        "In a transformer, put a normalisation at the start of the branch.",
        f"{PAPER}, Fig. 4 and Table 2",
        same_cause_as=("activation after addition",),
    ),
    Check(
        "normalised input",
        order.normalized_input,
        "std of layer inputs, furthest from 1",
        Limits((0.5, 2), (0.1, 10)),
        "Sums grow with the depth, and so does the input of a weight layer that reads them "
        "without normalisation.",
        "Put a normalisation between each weight layer and the previous weight layer or addition.",
        f"{PAPER}, Sec. 4.2",
        same_cause_as=("branch order",),
    ),
    Check(
        "final activation",
        order.final_activation,
        "normalisations after last addition",
        Limits((0, 1), (0, 1)),
        "Without a last normalisation and activation, the classifier reads the raw sum of all "
        "branches, and training can end in NaN. A second normalisation in a row does nothing.",
        "Put exactly one normalisation and one activation between the last addition and the "
        "pooling. Remove a normalisation that directly follows another one.",
        f"{PAPER}, appendix",
    ),
    Check(
        "gradient of the signal",
        sizes.signal_gradients,
        "first over last unit of the same shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "Vanishing gradients leave the first units untrained. Exploding gradients make their "
        "steps too large.",
        "Remove everything from the identity path, normalise the branches, or scale down their "
        "last weights with kp.initializers.DepthScaledHe().",
        f"{PAPER}, Eq. 5",
        follows_from=("identity path", "branch order", "normalised input"),
    ),
    Check(
        "gradient of the weights",
        sizes.weight_gradients,
        "first over last unit of the same shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "One learning rate suits all units only if their gradients have similar sizes.",
        "Remove everything from the identity path, normalise the branches, or scale down their "
        "last weights with kp.initializers.DepthScaledHe(). If the ratio is about the depth, "
        "use a learning-rate warm-up.",
        f"{PAPER}, Eq. 5",
        follows_from=(
            "identity path",
            "branch order",
            "normalised input",
            "gradient of the signal",
        ),
    ),
    Check(
        "signal growth",
        sizes.signal_growth,
        "growth of the mean square per unit",
        # Equal branches grow as the number of units; a factor of 2 per unit passes these limits
        # after 7 and 14 units.
        Limits((0, 10), (0, 1e3)),
        "With normalised branches, the signal grows in proportion to the depth. Faster growth "
        "is exponential and overflows.",
        "Normalise the branches. Without normalisation, scale down their last weights, as "
        "kp.models.FIXUP does.",
        f"{PAPER}, Eq. 4",
        follows_from=("identity path", "branch order", "normalised input"),
    ),
    Check(
        "weight scale",
        sizes.weight_scale,
        "worst gain of a weight layer",
        # He's gain is sqrt(2), or up to 2.8 if a bottleneck narrows by 4 with fan_out.
        Limits((1e-2, 10), (1e-4, 100)),
        "A weight layer should roughly keep the size of its input. Normalisation hides a wrong "
        "scale until weights must move.",
        "Use He's initialisation (variance 2 / fan), or an orthogonal one for very deep networks.",
        f"arXiv 1502.01852; {PAPER}, appendix",
    ),
    Check(
        "distinct weights",
        sizes.distinct_weights,
        "layers equal to an earlier one",
        Limits((0, 0), (0, 0)),
        "Layers that share an initialiser or a seed start equal: Keras returns the same values "
        "on each call.",
        "Give each layer its own initialiser, with its own seed or without one.",
        "arXiv 1502.01852, which draws each weight independently",
    ),
    Check(
        "live weights",
        sizes.live_weights,
        "broken layers or units",
        Limits((0, 0), (0, 0)),
        "NaN spreads to the output. A constant kernel gives all channels the same gradient. A "
        "branch with only zeros gets no gradient.",
        "Initialise the weights again. If a branch should start at zero, set only its last "
        "weight to zero.",
        "arXiv 1901.09321, whose branches start at zero",
    ),
    Check(
        "dead channels",
        sizes.dead_channels,
        "largest share of channels at 0",
        Limits((0, 0.1), (0, 0.5)),
        "A channel that is 0 for every example passes no gradient.",
        "Lower the learning rate, reset negative biases to 0, or use an activation that is not "
        "flat below 0, such as GELU.",
        "arXiv 1903.06733",
    ),
    Check(
        "sample scale",
        sizes.sample_scale,
        "std of the preprocessed input",
        Limits((SMALLEST_STD, LARGEST_SIZE), (SMALLEST_STD, INFINITY)),
        "A network has learned, or was initialised, for input of mean 0 and standard deviation 1. "
        "Pixels from 0 to 1 instead of 0 to 255, or the other way round, do not give such input.",
        "Pass the pixels that the preprocessing expects. Without preprocessing, pass `mean` and "
        "`std` to the builder, or use a Normalization layer.",
        f"{PAPER}, Sec. 5: preprocessing of CIFAR images",
    ),
    Check(
        "moving statistics",
        sizes.moving_statistics,
        "size of norms at inference over training",
        Limits((0.5, 2), (0.1, 10)),
        "At inference, batch normalisation uses moving statistics. If they do not fit the images, "
        "training looks fine, and evaluation and every exported model are wrong.",
        "Train for more updates, or give the batch normalisations a lower momentum, such as 0.9. "
        "If the images have changed, train on the new ones.",
        "arXiv 1502.03167, Sec. 3.1",
        follows_from=("normalised input", "sample scale"),
    ),
    Check(
        "output scale",
        sizes.output_scale,
        "root mean square of the logits",
        Limits((0, 10), (0, 100)),
        "Large logits saturate softmax and sigmoid: the first losses are huge, and most gradients "
        "are 0.",
        "Normalise before the classifier, and initialise its weights within 1 / sqrt(fan_in).",
        "arXiv 1901.09321",
        follows_from=("final activation", "signal growth", "sample scale"),
    ),
    Check(
        "loss and metrics",
        sizes.loss_and_metrics,
        "losses and metrics that do not fit",
        Limits((0, 0), (0, 0)),
        "A loss for probabilities gives wrong gradients on logits, and a loss for logits gives "
        "small ones on probabilities: the network learns little. Keras says so only in some cases.",
        "Use a loss with from_logits=True for logits, with from_logits=False after a softmax or "
        "sigmoid.",
        "Keras' documentation of `from_logits`",
    ),
)
