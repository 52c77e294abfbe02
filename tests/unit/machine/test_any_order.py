"""Whatever comes, in whatever order: the machine never raises, and no session is left that cannot go on.

Agents with nothing but tools, and all that can happen between clients, workers, losses and clocks.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from support.machine import Session
from support.schedules import Schedule
from turnmill.protocol.specs import AgentSpec, RetryPolicy, StopCondition, ToolSpec
from turnmill.runtime.machine import Limits

TOOLS = [
    ToolSpec(name="plain"),
    ToolSpec(name="patient", max_attempts=3, timeout_seconds=5, start_timeout_seconds=1),
    ToolSpec(name="again", idempotent=True),
]
AGENTS = st.builds(
    AgentSpec,
    name=st.just("agent"),
    model=st.just("scripted:x"),
    max_steps=st.integers(1, 4),
    on_limit=st.sampled_from(["error", "final_answer"]),
    stop_when=st.lists(
        st.sampled_from([StopCondition(steps=2), StopCondition(steps=3), StopCondition(tool="again")]), max_size=2
    ),
    tool_execution=st.sampled_from(["parallel", "sequential"]),
    tool_timeout_seconds=st.sampled_from([None, 2.0]),
    max_calls_per_step=st.sampled_from([2, 64]),
    retry=st.sampled_from([RetryPolicy(), RetryPolicy(max_attempts=1), RetryPolicy(max_attempts=5, backoff=1.0)]),
    model_timeout_seconds=st.sampled_from([3.0, 600.0]),
)


class AnyOrder(Schedule):
    @initialize(agent=AGENTS, queued=st.integers(0, 3), losses=st.integers(1, 4))
    def begin(self, agent: AgentSpec, queued: int, losses: int) -> None:
        self.session = Session(agent, TOOLS, Limits(queued, losses))


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
