"""Figures of the analyses. Each function takes results and returns a
`matplotlib.figure.Figure`.
"""

from keras_preact.analysis.figures.channels import channel_heat_map
from keras_preact.analysis.figures.contributions import logit_contributions
from keras_preact.analysis.figures.coordinates import coordinate_changes
from keras_preact.analysis.figures.diagrams import (
    arrangements_figure,
    diagram,
    diagrams_figure,
    network_diagram,
    shortcuts_figure,
    unit_diagram,
)
from keras_preact.analysis.figures.ensemble import lesion_errors, path_length_shares
from keras_preact.analysis.figures.identities import (
    composite_gains,
    direct_paths,
    gradient_split,
)
from keras_preact.analysis.figures.maps import class_maps
from keras_preact.analysis.figures.mean_field import depth_scales
from keras_preact.analysis.figures.propagation import (
    activation_norms,
    alignment,
    gradient_norms,
    residual_ratio,
    truncation,
    weight_gradients,
)
from keras_preact.analysis.figures.spectra import singular_values
from keras_preact.analysis.figures.training import training_curves, training_health
from keras_preact.analysis.figures.weight_spectra import spectral_norms
