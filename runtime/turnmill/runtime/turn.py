"""The handle of one turn: watch it, resume watching it, wait for its result, from any process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING, Any

import msgspec

from turnmill.protocol.codec import Unreadable, event_from_wire
from turnmill.protocol.connection import pairs
from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import TurnAbortedError, TurnFailedError, TurnLostError
from turnmill.protocol.events import (
    ENDED_STATUSES,
    EVENTS,
    Event,
    StepFinished,
    StepReset,
    StepSummary,
    TextDelta,
    TurnFailed,
    TurnFinished,
    TurnStarted,
    TurnSummary,
)
from turnmill.protocol.streams import ChannelEvent

from .channel import TERMINAL_KINDS, ChannelExpiredError
from .definitions import Agent, TurnOptions
from .results import SeenStep, TurnResult, build_result, step_result, unpack_message

if TYPE_CHECKING:
    from .client import Client

_ENDED = frozenset(status.encode() for status in ENDED_STATUSES)
EVENT_TYPES = frozenset(kind.type for kind in EVENTS)
_decode_summary = msgspec.json.Decoder(TurnSummary).decode
_decode_error = msgspec.json.Decoder(ErrorInfo).decode


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
        self._is_new = is_new
        self._keys = client.keys.of_turn(turn_id)
        self._status = "submitted" if is_new else "unknown"
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
        return self._status not in ("submitted", "unknown")

    @property
    def done(self) -> bool:
        """Whether this handle has seen the turn end."""
        return self._status in ENDED_STATUSES

    @property
    def aborted(self) -> bool:
        """Whether this handle has seen that the turn was stopped."""
        return self._status == "aborted"

    @property
    def pending_steering(self) -> tuple[Any, ...]:
        """Messages that wait for the next step, in their order."""
        return ()

    async def status(self) -> str:
        """submitted (not read by a coordinator yet), queued, running, finished, failed or aborted. Raises
        `TurnLostError` where nothing is known of the turn."""
        record = await self._record()
        self._status = record[b"status"].decode() if record else "submitted"
        return self._status

    async def events(self, after: int = 0, types: Collection[str] | None = None) -> AsyncIterator[Event]:
        """What happened after a number, then what happens, until exactly one `turn.finished` or `turn.failed`.

        Any number of iterations, from any process, see the same events. `types` chooses among them.
        """
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
                        common = _common_length(shown, spoken)
                        yield spoken[common:]
                        shown = spoken
                case StepReset():
                    spoken = ""
                case _ if event.type == "step.started":
                    shown = spoken = ""
                case _:
                    continue

    async def result(self) -> TurnResult:
        """Wait for the end. Raises `TurnFailedError` or `TurnAbortedError` with what the turn had by then."""
        async for piece in self._raw_events(0, skip=not self._is_new):
            raw = piece[-1]
            if raw.kind in TERMINAL_KINDS:
                event = event_from_wire(raw.kind, raw.body)
                assert isinstance(event, TurnFinished | TurnFailed)
                self._note(event)
                return await self._conclude(event)
        return await self._conclude_from_record()

    async def wait(self) -> TurnResult:
        """Same as `result`."""
        return await self.result()

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
                if chosen is not None and raw.kind not in chosen:
                    continue
                event = event_from_wire(raw.kind, raw.body)
                if isinstance(event, Unreadable):
                    continue  # of a newer version: what this reader does not know, it does not show
                self._note(event)
                seen.add(event)
                if isinstance(event, StepFinished):
                    event = seen.filled(event) or await self._with_step(event)
                decoded.append((raw.number, event))
            if decoded:
                yield decoded

    async def _raw_events(self, after: int, *, skip: bool = False) -> AsyncIterator[list[ChannelEvent]]:
        """The channel's events; nothing where `skip` is set and the record tells the end already."""
        if skip and await self._ended():
            return
        existing = not self._is_new
        if existing and not await self._client.engine.call("EXISTS", self._keys.events(self.id)):
            record = await self._record()
            if record.get(b"status") in _ENDED:
                yield [await self._gap(record)]
                return
            existing = False
        try:
            looks = 0
            async for piece in self._client.channels.follow(self._keys.events(self.id), after, existing=existing):
                if piece:
                    yield piece
                    continue
                # On a new turn the first look is before anything could have happened.
                looks += 1
                if (looks > 1 or after > 0) and await self._ended():
                    last = await self._client.engine.call("XREVRANGE", self._keys.events(self.id), "+", "-", "COUNT", 1)
                    if not last:  # the channel has come and gone
                        yield [await self._gap(await self._record())]
                        return
                    if int(last[0][0][2:]) <= after:
                        return
        except ChannelExpiredError:
            yield [await self._gap(await self._record())]

    async def _ended(self) -> bool:
        record = await self._record()
        return record.get(b"status") in _ENDED

    async def _record(self) -> dict[bytes, bytes]:
        """The turn's record; empty while its command waits in the inbox."""
        record = pairs(await self._client.engine.call("HGETALL", self._keys.turn(self.id)))
        if not record:
            if await self._client.is_submitted(self.id):
                return record
            # It may have been accepted between the two looks.
            record = pairs(await self._client.engine.call("HGETALL", self._keys.turn(self.id)))
        if not record:
            raise TurnLostError(
                f"nothing is known of turn {self.id}: it expired (TURNMILL_RECORD_TTL), or was never accepted in the "
                f"namespace {self._client.keys.prefix!r}",
                turn_id=self.id,
                error_type="unknown_turn",
            )
        self.session_id = record[b"session"].decode()
        if self.agent is None:
            self.agent = record[b"agent"].decode()
        return record

    async def _gap(self, record: dict[bytes, bytes]) -> ChannelEvent:
        """The channel has expired: what is left is the end."""
        number = 2**53 - 1
        if b"result" in record:
            summary = _decode_summary(record[b"result"])
            if summary.status == "finished":
                return ChannelEvent(number, b"turn.finished", 0, msgspec.json.encode(TurnFinished(result=summary)))
            return ChannelEvent(number, b"turn.failed", 0, msgspec.json.encode(_failed(summary)))
        if b"error" in record:
            error = _decode_error(record[b"error"])
            failed = TurnFailed(error=error.message, error_type=error.kind)
            return ChannelEvent(number, b"turn.failed", 0, msgspec.json.encode(failed))
        raise TurnLostError(
            f"the channel of turn {self.id} is gone and its record says {record.get(b'status', b'?').decode()!r}: "
            "the engine lost data",
            turn_id=self.id,
            error_type="state_lost",
        )

    async def _conclude_from_record(self) -> TurnResult:
        raw = await self._gap(await self._record())
        event = event_from_wire(raw.kind, raw.body)
        assert isinstance(event, TurnFinished | TurnFailed)
        self._note(event)
        return await self._conclude(event)

    async def _conclude(self, event: TurnFinished | TurnFailed) -> TurnResult:
        summary = event.result
        result = None
        if summary is not None:
            messages = await self._client.transcript(summary.session_id, summary.first_message, summary.end_message)
            result = build_result(summary, messages)
        if isinstance(event, TurnFinished):
            assert result is not None
            return result
        kind = TurnAbortedError if event.aborted else TurnFailedError
        raise kind(
            event.error, turn_id=self.id, error_type=event.error_type, termination=event.termination, result=result
        )

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
            case TurnFinished():
                self._status = "finished"
            case TurnFailed():
                self._status = "aborted" if event.aborted else "failed"
            case _:
                return


def _failed(summary: TurnSummary) -> TurnFailed:
    error = summary.error or ErrorInfo(kind=summary.status, message=f"the turn {summary.status}")
    return TurnFailed(
        error=error.message,
        error_type=error.kind,
        aborted=summary.status == "aborted",
        termination=summary.termination,
        result=summary,
    )


def _common_length(first: str, second: str) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
