"""Turns in flight while processes, connections and the engine are hit; afterwards everything is counted.

`python -m support.chaos SCENARIO` is behind scripts/chaos; short runs are tests. `run` drives the turns and counts,
`scenarios` says what is hit and what may be lost, and the files `*_faults` do it. What tools did is recorded in a file,
outside the engine that is under test.
"""

from .report import Plan, Report
from .run import run_chaos
from .scenarios import SCENARIOS

__all__ = ["SCENARIOS", "Plan", "Report", "run_chaos"]
