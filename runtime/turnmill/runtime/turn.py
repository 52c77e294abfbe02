"""The handle of one turn: watch it, resume watching it, wait for its result, from any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, overload

import msgspec
from ulid import ULID

from turnmill.protocol.codec import Unreadable, event_from_wire
from turnmill.protocol.connection import pairs
from turnmill.protocol.content import Message, OutputPart, ToolResult
from turnmill.protocol.errors import CommandRefusedError
from turnmill.protocol.events import (
    ENDED_STATUSES,
    EVENTS,
    Event,
    SteeringApplied,
    SteeringDropped,
    SteeringQueued,
    StepFinished,
    StepReset,
    StepSummary,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnResumed,
    TurnStarted,
    TurnSuspended,
)
from turnmill.protocol.keys import new_turn_id
from turnmill.protocol.messages import (
    AbortTurn,
    Answer,
    ApprovalDecision,
    CancelSteering,
    DecideApprovals,
    ResumeTurn,
    SteerTurn,
)
from turnmill.protocol.streams import ChannelEvent, read_through

from .channel import TERMINAL_KINDS, ChannelExpiredError, ChannelGoneError
from .definitions import Agent, TurnOptions
from .given import reason_of, results_of, steering_of
from .results import SeenStep, TurnResult, build_result, step_result, unpack_message
from .sub_turns import SubTurnEvent, with_sub_turns
from .turn_end import event_of_record, is_live, lost_turn, result_or_error, told_status, unknown_turn

if TYPE_CHECKING:
    from .client import Client

_SUSPENDED = TurnSuspended.type.encode()
_AT_REST = frozenset({b"suspended", *(status.encode() for status in ENDED_STATUSES)})
_ENDED = frozenset(status.encode() for status in ENDED_STATUSES)
_NOTED = frozenset(
    kind.type.encode()
    for kind in (
        TurnStarted,
        TurnFinished,
        TurnFailed,
        TurnSuspended,
        TurnResumed,
        SteeringQueued,
        SteeringApplied,
        SteeringDropped,
    )
)
"""What changes something that the handle knows of its turn."""
_AGAIN_SECONDS = 0.2
EVENT_TYPES = frozenset(kind.type for kind in EVENTS)


class SteeringEntry(msgspec.Struct, frozen=True):
    """A message for a live turn. `created_at` is seconds since the epoch."""

    id: str
    message: Message
    created_at: float


class Turn:
    """A turn as a client sees it. It lives in the engine; this handle may be dropped and made again by `attach`."""

    def __init__(
        self,
        client: Client,
        turn_id: str,
        *,
        session_id: str | None = None,
        agent: Agent | str | None = None,
        message: Any = None,
        options: TurnOptions | None = None,
        is_new: bool = False,
    ) -> None:
        self._client = client
        self.is_new = is_new
        """Started by this handle: its first event is still to come, and its start may not be read yet."""
        self._keys = client.keys.of_turn(turn_id)
        self._status = "unknown"
        self._steering: dict[str, SteeringEntry] = {}
        self.id = turn_id
        self.session_id = session_id
        self.agent = agent
        self.message = message
        self.options = options

    def __repr__(self) -> str:
        return f"<Turn {self.id} {self._status}>"

    @property
    def started(self) -> bool:
        """Whether this handle has seen the turn start."""
        return self._status not in ("submitted", "queued", "unknown")

    @property
    def done(self) -> bool:
        """Whether this handle has seen the turn end."""
        return self._status in ENDED_STATUSES

    @property
    def aborted(self) -> bool:
        """Whether this handle has seen that the turn was stopped."""
        return self._status == "aborted"

    @property
    def pending_steering(self) -> tuple[SteeringEntry, ...]:
        """Messages that wait for the next step, in their order: those that this handle has sent or seen, without those
        that it has seen applied or dropped."""
        return tuple(self._steering.values())

    async def status(self) -> str:
        """submitted (not read by a coordinator yet), queued, running, suspended, finished, failed or aborted. Raises
        `TurnLostError` where nothing is known of the turn."""
        record = await self._record()
        self._status = record[b"status"].decode() if record else "submitted"
        return self._status

    @overload
    def events(
        self, after: int = 0, types: Collection[str] | None = None, *, sub_turns: Literal[False] = False
    ) -> AsyncIterator[Event]: ...

    @overload
    def events(
        self, after: int = 0, types: Collection[str] | None = None, *, sub_turns: Literal[True]
    ) -> AsyncIterator[Event | SubTurnEvent]: ...

    def events(
        self, after: int = 0, types: Collection[str] | None = None, *, sub_turns: bool = False
    ) -> AsyncIterator[Event | SubTurnEvent]:
        """What happened after a number, then what happens, until exactly one `turn.finished` or `turn.failed`.

        Any number of iterations, from any process, see the same events. `types` chooses among them. With `sub_turns`
        the events of turns that this one starts, and of those below, come between them as `SubTurnEvent`.
        """
        events = self._events(after, types)
        return with_sub_turns(self._client.attach, self._events(after), types) if sub_turns else events

    async def _events(self, after: int, types: Collection[str] | None = None) -> AsyncIterator[Event]:
        async for piece in self._pieces(after, types):
            for _number, event in piece:
                yield event

    async def numbered_events(
        self, after: int = 0, types: Collection[str] | None = None
    ) -> AsyncIterator[tuple[int, Event]]:
        """`events` with each event's number: the cursor to resume from."""
        async for piece in self._pieces(after, types):
            for numbered in piece:
                yield numbered

    async def text_stream(self) -> AsyncIterator[str]:
        """Only the text, as it comes.

        A step that is attempted again begins anew: text that was yielded before is not yielded twice, and the new
        attempt's text goes on from where it differs.
        """
        shown = spoken = ""
        async for event in self.events(types=("text.delta", "step.reset", "step.started")):
            match event:
                case TextDelta():
                    spoken += event.text
                    if len(spoken) > len(shown) and spoken.startswith(shown):
                        yield spoken[len(shown) :]
                        shown = spoken
                    elif not shown.startswith(spoken):
                        common = len(commonprefix([shown, spoken]))  # noqa: RUF071  # of texts, not of paths
                        yield spoken[common:]
                        shown = spoken
                case StepReset():
                    spoken = ""
                case _ if event.type == "step.started":
                    shown = spoken = ""
                case _:
                    continue

    async def result(self) -> TurnResult:
        """Wait for the end, or for a rest: a turn that waits for its host or for an approval gives a result with
        `status="suspended"`. Raises `TurnFailedError` or `TurnAbortedError` with what the turn had by then."""
        async for piece in self._raw_events(0, skip=not self.is_new):
            raw = piece[-1]
            if raw.kind in TERMINAL_KINDS or (raw.kind == _SUSPENDED and await self.status() == "suspended"):
                event = event_from_wire(raw.kind, raw.body)
                assert isinstance(event, TurnFinished | TurnFailed | TurnSuspended)
                self._note(event)
                return await self._conclude(event)
        return await self._conclude_from_record()

    async def wait(self) -> TurnResult:
        """Same as `result`."""
        return await self.result()

    # ---- say something to it

    async def steer(
        self,
        message: str | Message | Sequence[OutputPart],
        *,
        role: Literal["user", "system"] = "user",
        mode: Literal["steer", "queue"] = "steer",
    ) -> SteeringEntry:
        """Give the turn another message: before its next model call (`steer`), or as the session's next turn (`queue`;
        the entry's id is that turn's id). `message` is a text, a list of parts, or a `Message`.

        Raises `TurnEndedError` where the turn has ended, `CommandRefusedError` where too many messages wait.
        """
        message = steering_of(message, role)
        session_id = await self._session()
        stored = await self._client.stored_message(session_id, message)
        entry = SteeringEntry(new_turn_id(self._keys.partition), message, time.time())
        command = SteerTurn(session_id=session_id, turn_id=self.id, steering_id=entry.id, message=stored, mode=mode)
        if mode == "steer":
            self._steering[entry.id] = entry
        try:
            await self._client.request(command, entry.id)
        except CommandRefusedError:
            self._steering.pop(entry.id, None)
            raise
        return entry

    send = steer

    async def cancel_steering(self, steering_id: str) -> bool:
        """Take a message back. False where it was claimed, dropped or cancelled already."""
        answer = await self._request(CancelSteering, steering_id=steering_id)
        self._steering.pop(steering_id, None)
        return bool(answer.done)

    async def abort(self, reason: str | None = None) -> bool:
        """Stop the turn, wherever it stands; returns when that is decided, its end follows within seconds. May be
        repeated. True where the turn is stopped by this or an earlier call, False where it had ended otherwise."""
        answer = await self._request(AbortTurn, reason=reason_of(reason))
        return True if answer.done else await self.status() == "aborted"

    async def resume(
        self,
        *,
        tool_results: Mapping[str, Any] | Sequence[ToolResult | Mapping[str, Any]] = (),
        message: str | Message | Sequence[OutputPart] | None = None,
    ) -> tuple[str, ...]:
        """Give the results of calls that no worker runs, all or some of them; the ids of those still missing.

        `tool_results` maps call ids to values, or is a list of `ToolResult`s or of `{"tool_call_id", "result",
        "is_error"}`. `message` becomes steering behind the results. The first result of a call wins. Raises
        `CommandRefusedError` of kind `unknown_tool_result`, `no_pending_tools` or `tool_results_required`.
        """
        given, said = results_of(tool_results), None if message is None else steering_of(message)
        session_id = await self._session()
        results = [await self._client.stored_result(session_id, item) for item in given]
        if said is not None:
            said = await self._client.stored_message(session_id, said)
        answer = await self._request(ResumeTurn, tool_results=results, message=said)
        self._status = "running"
        return tuple(answer.pending)

    async def approve(self, *tool_call_ids: str, reason: str | None = None) -> tuple[str, ...]:
        """Let calls run that wait for a person; the ids of those that still wait. The first decision on a call stands,
        and may be repeated. Raises `CommandRefusedError` of kind `no_pending_approval`, or `already_decided` where a call
        was decided otherwise: nothing is decided then."""
        return await self._decide(tool_call_ids, True, reason)

    async def deny(self, *tool_call_ids: str, reason: str | None = None) -> tuple[str, ...]:
        """Do not let calls run: the model is told so, with the reason. Otherwise as `approve`."""
        return await self._decide(tool_call_ids, False, reason)

    async def _decide(self, ids: Sequence[str], approved: bool, reason: str | None) -> tuple[str, ...]:
        why = reason_of(reason)
        decisions = [ApprovalDecision(tool_call_id=call_id, approved=approved, reason=why) for call_id in ids]
        answer = await self._request(DecideApprovals, decisions=decisions)
        self._status = "running"
        return tuple(answer.pending)

    async def _request(self, kind: type[Any], **fields: Any) -> Answer:
        request_id = str(ULID()).lower()
        session_id = await self._session()
        command = kind(session_id=session_id, turn_id=self.id, request_id=request_id, **fields)
        return await self._client.request(command, request_id)

    async def _session(self) -> str:
        """The turn's session, also while its start waits in the inbox."""
        if self.session_id is None:
            await self._record()
        assert self.session_id is not None
        return self.session_id

    # ---- from the engine

    async def _pieces(self, after: int, types: Collection[str] | None) -> AsyncIterator[list[tuple[int, Event]]]:
        """The events in the pieces in which they come: each costs one turn of the loop, however many there are."""
        if not isinstance(after, int) or after < 0:
            raise ValueError(f"after={after!r}: the number of the last event seen, 0 for all")
        if isinstance(types, str) or not EVENT_TYPES.issuperset(types or ()):
            raise ValueError(f"types={types!r}: a collection of event types, such as {{'text.delta'}}")
        chosen = None if types is None else {*(kind.encode() for kind in types), *TERMINAL_KINDS}
        seen = SeenStep(complete=after == 0 and types is None)
        async for piece in self._raw_events(after):
            decoded: list[tuple[int, Event]] = []
            for raw in piece:
                kind = raw.kind
                if chosen is not None and kind not in chosen:
                    continue
                event = event_from_wire(kind, raw.body)
                if isinstance(event, Unreadable):
                    continue  # of a newer version: what this reader does not know, it does not show
                if kind in _NOTED:
                    self._note(event)
                if kind in SeenStep.kinds:
                    seen.add(event)
                elif isinstance(event, StepFinished):
                    event = seen.filled(event) or await self._with_step(event)
                decoded.append((raw.number, event))
            if decoded:
                yield decoded

    async def _raw_events(self, after: int, *, skip: bool = False) -> AsyncIterator[list[ChannelEvent]]:
        """The channel's events; nothing where `skip` is set and the record tells the end already."""
        if skip and (await self._record()).get(b"status") in _AT_REST:
            return
        existing = not self.is_new
        if existing and not await self._ask("EXISTS", self._keys.events(self.id)):
            record = await self._record()
            if record.get(b"status") not in _ENDED:
                existing = False
            elif not await self._ask("EXISTS", self._keys.events(self.id)):  # else it has just ended
                yield [await self._gap(record)]
                return
        looks = seen = 0
        try:
            async for piece in self._client.channels.follow(self._keys.events(self.id), after, existing=existing):
                if piece:
                    seen = piece[-1].number
                    yield piece
                    continue
                # On a new turn the first look is before anything could have happened.
                looks += 1
                if (looks > 1 or after > 0) and await self._ended():
                    last = await self._ask("XREVRANGE", self._keys.events(self.id), "+", "-", "COUNT", 1)
                    number = int(last[0][0][2:]) if last else 0
                    if number <= seen or number < after:
                        # The channel has come and gone, or the engine has come back with less of it than was seen.
                        yield [await self._gap(await self._record())]
                        return
                    if number == after:
                        return
        except ChannelExpiredError as error:
            record = await self._record()
            begins = isinstance(error, ChannelGoneError) and (
                record.get(b"status", b"queued") == b"queued" or await self._ask("EXISTS", self._keys.events(self.id))
            )
            if not begins:
                yield [await self._gap(record)]
                return
            # A failover took its beginning back: it begins again.
            await asyncio.sleep(_AGAIN_SECONDS)
            async for piece in self._raw_events(max(after, seen)):
                yield piece

    async def _ended(self) -> bool:
        """Raises `TurnLostError` where the record says that the turn is live, and its session knows nothing of it."""
        record = await self._record()
        if not record or record.get(b"status") in _ENDED:
            return bool(record)
        if not is_live(await self._ask("HGET", self._keys.session(await self._session()), "s"), self.id):
            record = await self._record()  # it may have ended between the two looks
            if record.get(b"status") not in _ENDED:
                raise lost_turn(self.id, f"{told_status(record)}, its session does not have it")
        return record.get(b"status") in _ENDED

    def _ask(self, *arguments: Any) -> Coroutine[Any, Any, Any]:
        return read_through(self._client.engine, *arguments)

    async def _record(self) -> dict[bytes, bytes]:
        """The turn's record; empty while its command waits in the inbox."""
        record = pairs(await self._ask("HGETALL", self._keys.turn(self.id)))
        if not record:
            session_id = await self._client.submitted_session(self.id)
            if session_id is not None:
                self.session_id = session_id
                return record
            # It may have been accepted between the two looks.
            record = pairs(await self._ask("HGETALL", self._keys.turn(self.id)))
        if not record and self.session_id is not None:
            raise lost_turn(self.id, "it was there, and nothing is known of it any more")
        if not record:
            raise unknown_turn(self.id, self._client.keys.prefix)
        if not record.keys() >= {b"session", b"agent"}:
            raise lost_turn(self.id, "its record was lost and written in part since")
        self.session_id = record[b"session"].decode()
        if self.agent is None:
            self.agent = record[b"agent"].decode()
        return record

    async def _gap(self, record: dict[bytes, bytes]) -> ChannelEvent:
        """The channel has expired, or the turn rests: what its record tells."""
        number = 2**53 - 1
        event = event_of_record(record)
        if event is not None:
            return ChannelEvent(number, event.type.encode(), 0, msgspec.json.encode(event))
        raise lost_turn(self.id, f"{told_status(record)}, its channel is gone")

    async def _conclude_from_record(self) -> TurnResult:
        raw = await self._gap(await self._record())
        event = event_from_wire(raw.kind, raw.body)
        assert isinstance(event, TurnFinished | TurnFailed | TurnSuspended)
        self._note(event)
        return await self._conclude(event)

    async def _conclude(self, event: TurnFinished | TurnFailed | TurnSuspended) -> TurnResult:
        summary = event.result
        result = None
        if summary is not None:
            place = summary.session_id, summary.first_message, summary.end_message
            messages, wanted = await self._client.transcript(*place), summary.end_message - summary.first_message
            if len(messages) < wanted and not isinstance(event, TurnFailed):
                if not await self._ended():
                    return await self.result()  # a failover took this end back: it comes again
                messages = await self._client.transcript(*place)  # it may have come between the two looks
                if len(messages) < wanted:
                    raise lost_turn(self.id, "messages of it are gone, deleted with its session or lost")
            result = build_result(summary, messages, self._output_type)
        return result_or_error(self.id, event, result)

    @property
    def _output_type(self) -> Any:
        """The pydantic model of the output, where this handle was given one."""
        if self.options is not None and self.options.output is not None:
            return self.options.output_type
        return self.agent.output_type if isinstance(self.agent, Agent) else None

    async def _with_step(self, event: StepFinished) -> StepFinished:
        """The step's content, which the wire does not repeat."""
        step = event.step
        if self.session_id is None:  # a reader that began behind `turn.started`
            await self._record()
        assert self.session_id is not None
        messages = await self._client.transcript(self.session_id, step.first_message, step.end_message)
        if not messages:
            return event
        content = step_result([unpack_message(message) for message in messages])
        filled: StepSummary = msgspec.structs.replace(
            step,
            text=content.text,
            reasoning="".join(part.text for part in content.reasoning_parts) or None,
            tool_calls=content.tool_calls,
            tool_results=content.tool_results,
        )
        return msgspec.structs.replace(event, step=filled)

    def _note(self, event: Event) -> None:
        match event:
            case TurnStarted():
                self._status, self.session_id = "running", event.session_id
            case TurnSuspended():
                self._status = "suspended"
            case TurnResumed():
                self._status = "running"
            case SteeringQueued():
                entry = SteeringEntry(event.steering_id, event.message, time.time())
                self._steering.setdefault(event.steering_id, entry)
            case SteeringApplied() | SteeringDropped():
                self._steering.pop(event.steering_id, None)
            case TurnFinished():
                self._status = "finished"
            case TurnFailed():
                self._status = "aborted" if event.aborted else "failed"
            case _:
                return
