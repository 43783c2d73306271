"""Costs of a run, for `keras-preact train RECIPE --dry-run`: multiplications, memory,
learning rate, time.
"""

from .clock import Clock
from .costs import Costs, costs
from .memory import memory
from .page import Timing, describe_run
