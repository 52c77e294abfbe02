"""What the machine asks the shell to do. All effects of one decision land in one commit, or none does."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from turnmill.protocol.content import Message
from turnmill.protocol.events import Event
from turnmill.protocol.messages import AbortTurn, Answer, HandOff, ModelTask, StartTurn, SubTurnEnded, ToolTask

from .state import SessionState


class Publish(msgspec.Struct, frozen=True):
    """Append an event to a turn's channel. `opens` creates the channel; `closes` starts its expiry."""

    turn_id: str
    event: Event
    opens: bool = False
    closes: bool = False


class Append(msgspec.Struct, frozen=True):
    """Append a message to the session's transcript."""

    message: Message


class Replace(msgspec.Struct, frozen=True):
    """Append to the messages that stand in for parts of the transcript in the model's view."""

    message: Message


class DispatchModel(msgspec.Struct, frozen=True):
    """Hand a model call to a pool, through the dispatch window."""

    task: ModelTask
    pool: str
    tenant: str
    priority: int
    provider: str = ""


class DispatchTool(msgspec.Struct, frozen=True):
    """Hand a tool call to a queue."""

    task: ToolTask
    queue: str


class Send(msgspec.Struct, frozen=True):
    """A message of one session to another one of the same partition, or to itself."""

    message: StartTurn | AbortTurn | HandOff | SubTurnEnded


class Cancel(msgspec.Struct, frozen=True):
    """Tell the workers that a turn is stopped: a marker that they find, and a word to those who listen."""

    turn_id: str
    reason: str


class Reply(msgspec.Struct, frozen=True):
    """Answer a command under the id that it named."""

    request_id: str
    answer: Answer


class Keep(msgspec.Struct, frozen=True):
    """Large values that the session refers to from now on; they expired soon otherwise."""

    keys: list[str]


class DeleteSession(msgspec.Struct, frozen=True):
    """Remove everything of the session."""


class Record(msgspec.Struct, frozen=True):
    """Set fields of a turn's record; `ends` starts its expiry. `releases` is the idempotency key (its name behind the
    partition) that may stand for another turn from now on, because this one did not come to be."""

    turn_id: str
    fields: dict[str, str | bytes]
    ends: bool = False
    releases: str = ""


class Index(msgspec.Struct, frozen=True):
    """Enter the turn into the partition's index."""

    turn_id: str
    created_ms: int


class Feed(msgspec.Struct, frozen=True):
    """Tell the lifecycle feed."""

    turn_id: str
    session_id: str
    agent_id: str
    event: str
    detail: str | None = None


class SetTimer(msgspec.Struct, frozen=True):
    """Have `timer_fired` sent at a time of the engine's clock; None clears it."""

    at_ms: int | None


class Load(msgspec.Struct, frozen=True):
    """Turns of a tenant that wait or run: so many more, or fewer."""

    tenant: str
    change: int


class Count(msgspec.Struct, frozen=True):
    """Add one to a counter of the partition."""

    name: str


Effect: TypeAlias = (
    Publish
    | Append
    | Replace
    | DispatchModel
    | DispatchTool
    | Send
    | Cancel
    | Reply
    | Keep
    | DeleteSession
    | Record
    | Index
    | Feed
    | SetTimer
    | Load
    | Count
)


class Decision(msgspec.Struct, frozen=True):
    """The machine's answer to one message.

    `live` names the model attempt that may publish from now on ("" for none, None for no change). `new_turn` is a turn
    that must not be known yet: if its record exists, the message is a repetition.
    """

    state: SessionState
    effects: list[Effect]
    live: str | None = None
    new_turn: str | None = None
    discarded: str | None = None
