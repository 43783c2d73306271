"""Measure how signals travel through residual networks, before and after training."""

from keras_preact.analysis import figures
from keras_preact.analysis.audit import Audit, AuditFinding, Status, audit
from keras_preact.analysis.channels import ChannelProfile, channel_profile
from keras_preact.analysis.contributions import Contributions, contributions
from keras_preact.analysis.coordinates import CoordinateCheck, coordinate_check
from keras_preact.analysis.curvature import (
    CriticalRate,
    Curvature,
    GradientNoise,
    critical_rate,
    curvature,
    gradient_noise,
)
from keras_preact.analysis.ensemble import Lesions, lesions, path_lengths, random_lesions
from keras_preact.analysis.grad_cam import grad_cam
from keras_preact.analysis.identities import (
    CompositeGain,
    DirectPath,
    IdentityCheck,
    check_identities,
    composite_gain,
    direct_path,
    expected_gain,
)
from keras_preact.analysis.jacobians import Spectrum, between, jacobian, spectrum
from keras_preact.analysis.mean_field import MeanField, critical_weight_variance
from keras_preact.analysis.propagation import Propagation, propagation
from keras_preact.analysis.weight_spectra import WeightSpectra, weight_spectra
