"""The checks of an audit as a table: what is measured, from where on it warns and fails, why, and what to do about it."""

from keras_preact.analysis.audit import order, sizes
from keras_preact.analysis.audit.check import Check, Limits

INFINITY = float("inf")
PAPER = "arXiv 1603.05027"

#: The checks in their order. The limits are rules of thumb, but for those of what is exact.
CHECKS: tuple[Check, ...] = (
    Check(
        "identity path",
        order.identity_path,
        "largest ||h(x) - x|| / ||x||",
        Limits((0, 1e-5), (0, 1e-5)),  # rounding, where a layer casts
        "Factors on the shortcut are multiplied over all units: signals and gradients shrink or grow with the depth.",
        "Leave x as it is between additions: no scaling, gate, convolution, dropout, normalisation or activation.",
        f"Eq. 6 to 8 and Table 1 of {PAPER}",
    ),
    Check(
        "activation after addition",
        order.activation_after_addition,
        "mean share of values cut",
        Limits((0, 0), (0, 1)),
        "f is not the identity: gradients are blocked wherever the sum is negative, more so the deeper the network.",
        "Put normalisation and activation in front of the weights, and a last pair into the head: full pre-activation.",
        f"Sec. 4 and Fig. 4 of {PAPER}",
    ),
    Check(
        "branch order",
        order.branch_order,
        "share of units not pre-activated",
        Limits((0, 0), (0, 1)),
        "Full pre-activation, norm - activation - weight, is the order that trains best and regularises most.",
        "Put a normalisation, then an activation, in front of every weight of the branch (in a transformer: a normalisation).",
        f"Fig. 4 and Table 2 of {PAPER}",
    ),
    Check(
        "normalised input",
        order.normalized_input,
        "worst standard deviation",
        Limits((0.5, 2), (0.1, 10)),
        "A weight layer that reads sums as they are sees values that grow with the depth.",
        "Put a normalisation between each weight layer and the weight or addition in front of it.",
        f"Sec. 4.2 of {PAPER}",
    ),
    Check(
        "dropout",
        order.dropout_places,
        "relative difference of two passes",
        Limits((0, 1e-6), (0, 1e-6)),
        "Dropout on the identity path scales the signal by its rate once a unit, as a random shortcut factor.",
        "Move it into the branch: behind an activation in front of a weight, or in front of the addition.",
        f"Sec. 3.1 of {PAPER} (dropout shortcut: fails to converge)",
    ),
    Check(
        "final activation",
        order.final_activation,
        "normalisations behind the last addition",
        Limits((0, 1), (0, 1)),
        "Without it the classifier reads the sum of all branches as it is: training ends in NaN. Twice does nothing.",
        "Put one normalisation and activation between the last addition and the pooling; no two normalisations in a row.",
        f"appendix of {PAPER}",
    ),
    Check(
        "gradient of the signal",
        sizes.signal_gradients,
        "first unit over last of its shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "Gradients that shrink leave the first units untrained; gradients that grow make steps too large there.",
        "Clean the identity path, normalise the branches, scale their last weights (kp.initializers.DepthScaledHe()).",
        f"Eq. 5 of {PAPER}",
    ),
    Check(
        "gradient of the weights",
        sizes.weight_gradients,
        "first unit over last of its shape",
        Limits((0.1, 10), (1e-3, 1e3)),
        "One learning rate serves all units only where their gradients are of one size.",
        "As for the gradient of the signal; a warm-up of the learning rate where the ratio is that of the depth.",
        f"Eq. 5 of {PAPER}",
    ),
    Check(
        "signal growth",
        sizes.signal_growth,
        "growth of mean x^2 / units",
        # Branches of one size add up to a growth as the number of units; a factor 2 a unit passes these limits after 7 and 14.
        Limits((0, 10), (0, 1e3)),
        "Additions of normalised branches let the signal grow as the depth; faster growth is exponential and overflows.",
        "Normalise the branches; without normalisation, scale their last weights, as kp.models.FIXUP does.",
        f"Eq. 4 of {PAPER}",
    ),
    Check(
        "weight scale",
        sizes.weight_scale,
        "worst gain of a weight layer",
        # He's gain is sqrt(2), up to 2.8 where a bottleneck narrows by 4 under fan_out.
        Limits((1e-2, 10), (1e-4, 100)),
        "A weight layer should about keep the size of its input; normalisation hides a wrong scale until weights must move.",
        "He's initialisation (the variance 2 / fan), or an orthogonal one for very deep networks.",
        "arXiv 1502.01852; appendix of arXiv 1603.05027",
    ),
    Check(
        "distinct weights",
        sizes.distinct_weights,
        "kernels that equal another one",
        Limits((0, 0), (0, 0)),
        "Layers that start equal were given one seed: a Keras initialiser returns the same values each time it is called.",
        "Give every layer an initialiser with a seed of its own, or none.",
        "arXiv 1502.01852, which draws each weight by itself",
    ),
    Check(
        "live weights",
        sizes.live_weights,
        "broken kernels or units",
        Limits((0, 0), (0, 0)),
        "NaN spreads, constant kernels give all channels the same gradient, and a branch of zeros alone gets none.",
        "Initialise again; where a branch should start at zero, only its last weight does.",
        "arXiv 1901.09321 (a branch that starts at zero)",
    ),
    Check(
        "dead channels",
        sizes.dead_channels,
        "largest share of channels at 0",
        Limits((0, 0.1), (0, 0.5)),
        "A channel that is 0 for every example passes no gradient.",
        "Lower the learning rate or the biases; an activation that is not flat below 0, such as GELU.",
        "arXiv 1903.06733",
    ),
    Check(
        "sample scale",
        sizes.sample_scale,
        "size of what the network reads",
        Limits((0.1, 10), (0, INFINITY)),
        "Raw pixels, 0 to 255, make the first layer's gradients hundreds of times larger than the others'.",
        "Subtract the mean and divide by the standard deviation: builders take `mean` and `std`, or a Normalization layer.",
        f"Sec. 5 of {PAPER} (data preprocessing of the CIFAR networks)",
    ),
    Check(
        "output scale",
        sizes.output_scale,
        "root mean square of the logits",
        Limits((0, 10), (0, 100)),
        "Large logits saturate the softmax: the first losses are huge, and most gradients 0.",
        "Normalise in front of the classifier, and start its weights within 1 / sqrt(fan_in).",
        "arXiv 1901.09321",
    ),
)
