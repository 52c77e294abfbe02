"""A decision in the making: the copied state, and the effects in the order they were decided."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turnmill.protocol.blob_refs import refs_of, refs_of_result
from turnmill.protocol.content import Message, ToolResult
from turnmill.protocol.events import Event
from turnmill.protocol.keys import is_idempotency_name
from turnmill.protocol.messages import Answer, StartTurn
from turnmill.protocol.specs import Plan, RetryPolicy

from .effects import Append, Count, Effect, Feed, Index, Keep, Publish, Record, Reply
from .state import SessionState, TurnState

encode_json = msgspec.json.Encoder().encode


class Draft:
    """What the parts of the machine write into."""

    __slots__ = (
        "discarded",
        "effects",
        "event_bytes_max",
        "live",
        "losses_max",
        "new_turn",
        "now_ms",
        "plans",
        "session_id",
        "state",
    )

    def __init__(
        self,
        state: SessionState,
        session_id: str,
        now_ms: int,
        plans: Mapping[str, Plan],
        losses_max: int,
        event_bytes_max: int,
    ) -> None:
        self.state = state
        self.session_id = session_id
        self.now_ms = now_ms
        self.plans = plans
        self.losses_max = losses_max
        self.event_bytes_max = event_bytes_max
        self.effects: list[Effect] = []
        self.live: str | None = None
        self.new_turn: str | None = None
        self.discarded: str | None = None

    def plan_of(self, turn: TurnState) -> Plan | None:
        return self.plans.get(turn.plan_id)

    def plan(self, turn: TurnState) -> Plan:
        return self.plans[turn.plan_id]

    def discard(self, reason: str) -> None:
        """The message changes nothing; it is counted under `reason`."""
        self.discarded = reason
        self.effects = [Count(reason)]

    def reply(self, request_id: str, answer: Answer) -> None:
        if request_id:
            self.effects.append(Reply(request_id, answer))

    def publish(self, event: Event) -> None:
        """To the live turn's channel."""
        assert self.state.turn is not None
        self.effects.append(Publish(self.state.turn.turn_id, event))

    def open_channel(self, turn_id: str, event: Event) -> None:
        self.effects.append(Publish(turn_id, event, opens=True))

    def close_channel(self, turn_id: str, event: Event) -> None:
        self.effects.append(Publish(turn_id, event, closes=True))

    def keep_blobs(self, *values: Message | ToolResult) -> None:
        """What these refer to is the session's from now on. Where the session is about to be deleted, what is left of it
        is told once that is done."""
        names: list[str] = []
        for value in values:
            names += refs_of(value) if isinstance(value, Message) else refs_of_result(value)
        if names and not self.state.deletions:
            self.effects.append(Keep(names))

    def append(self, message: Message) -> None:
        self.effects.append(Append(message))
        self.state.length += 1

    def record_queued(self, command: StartTurn) -> None:
        self.effects.append(Record(command.turn_id, self._head(command, "queued")))
        self.effects.append(Index(command.turn_id, self.now_ms))

    def record_started(self, command: StartTurn, *, was_queued: bool) -> None:
        if was_queued:
            self.effects.append(Record(command.turn_id, {"status": "running"}))
        else:
            self.effects.append(Record(command.turn_id, self._head(command, "running")))
            self.effects.append(Index(command.turn_id, self.now_ms))

    def record_ended(self, turn_id: str, status: str, summary: msgspec.Struct) -> None:
        self.effects.append(Record(turn_id, {"status": status, "result": encode_json(summary)}, ends=True))

    def record_status(self, turn_id: str, status: str, summary: msgspec.Struct | None = None) -> None:
        fields: dict[str, str | bytes] = {"status": status}
        if summary is not None:
            fields["result"] = encode_json(summary)
        self.effects.append(Record(turn_id, fields))

    def record_refused(self, command: StartTurn, error: msgspec.Struct, status: str = "failed") -> None:
        fields = {**self._head(command, status), "error": encode_json(error)}
        # The same call is a fresh try, unless its turn was accepted once, and dropped from the queue.
        releases = command.idempotency if status == "failed" and command.idempotency in fields else ""
        fields.pop(releases, None)
        self.effects.append(Record(command.turn_id, fields, ends=True, releases=releases))
        self.effects.append(Index(command.turn_id, self.now_ms))

    def feed(self, turn_id: str, agent_id: str, event: str, detail: str | None = None) -> None:
        self.effects.append(Feed(turn_id, self.session_id, agent_id, event, detail))

    def backoff_ms(self, policy: RetryPolicy, failures: int) -> int:
        """Exponential, without jitter: the machine has no randomness, and tasks are spread by their own times."""
        seconds = min(policy.max_delay_seconds, policy.initial_delay_seconds * policy.backoff ** (failures - 1))
        return int(seconds * 1000)

    def _head(self, command: StartTurn, status: str) -> dict[str, str | bytes]:
        head: dict[str, str | bytes] = {
            "session": self.session_id,
            "agent": command.agent.partition("@")[0],
            "status": status,
            "created": str(self.now_ms),
        }
        if is_idempotency_name(command.idempotency):
            head[command.idempotency] = ""
        return head
