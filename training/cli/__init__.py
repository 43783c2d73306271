"""The words of a command line become the call of a function."""

from .options import PREEMPTED, VERBOSE, choose, fail, guard, main, parse, split_verbose

__all__ = ["PREEMPTED", "VERBOSE", "choose", "fail", "guard", "main", "parse", "split_verbose"]
