"""What a run would take, for `python -m training.train RECIPE --dry-run`: multiplications, memory, learning rate, time."""

from training.estimates.clock import Clock
from training.estimates.costs import Costs, costs
from training.estimates.memory import memory
from training.estimates.page import Timing, describe_run, schedule_plot
