"""`turnmill show TURN`: a turn's summary, its events, its messages, or its timeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .exits import CommandError, Exit

if TYPE_CHECKING:
    from turnmill.protocol.content import Message
    from turnmill.protocol.events import Event
    from turnmill.protocol.settings import Settings
    from turnmill.protocol.streams import ChannelEvent

    from ..client import Client
    from ..inspection import TurnRecord

TurnId = Annotated[str, typer.Argument(metavar="TURN", help="A turn's id.", show_default=False)]
Events = Annotated[bool, typer.Option("--events", envvar="TURNMILL_EVENTS", help="All events so far.")]
Messages = Annotated[bool, typer.Option("--messages", envvar="TURNMILL_MESSAGES", help="Its part of the transcript.")]
Timeline = Annotated[bool, typer.Option("--timeline", envvar="TURNMILL_TIMELINE", help="Where the time went.")]


def show(
    turn: TurnId,
    events: Events = False,
    messages: Messages = False,
    timeline: Timeline = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    if [events, messages, timeline].count(True) > 1:
        raise CommandError("show takes one of --events, --messages and --timeline")
    part = "events" if events else "messages" if messages else "timeline" if timeline else "summary"
    return run_command(_show(command_settings(redis_url, namespace), turn, part, as_json))


async def _show(settings: Settings, turn_id: str, part: str, as_json: bool) -> int:
    from .attachment import attached_client
    from .lookup import known_record

    async with attached_client(settings) as client:
        record = await known_record(client.engine, client.keys, turn_id)
        match part:
            case "events":
                lines = _event_lines(await _kept_events(client, record), as_json)
            case "messages":
                lines = _message_lines(await _messages_of(client, record), as_json)
            case "timeline":
                lines = _timeline(record, await _kept_events(client, record), as_json)
            case _:
                lines = _json_summary(record) if as_json else _summary(record, await _messages_of(client, record))
        for line in lines:
            sys.stdout.write(line + "\n")
    return Exit.OK


async def _kept_events(client: Client, record: TurnRecord) -> list[ChannelEvent]:
    from ..inspection import read_events

    kept = await read_events(client.engine, client.keys, record.turn_id)
    if not kept and record.state != "queued":
        raise CommandError(f"the events of turn {record.turn_id} have expired (TURNMILL_EVENT_TTL)", Exit.FAILED)
    return kept


async def _messages_of(client: Client, record: TurnRecord) -> list[Message]:
    if record.summary is not None:
        summary = record.summary
        return await client.transcript(record.session_id, summary.first_message, summary.end_message)
    return [m for m in await client.transcript(record.session_id) if m.turn_id == record.turn_id]


# ---- lines


def _json_summary(record: TurnRecord) -> Iterator[str]:
    import msgspec

    yield msgspec.json.encode(record.to_dict()).decode()


def _summary(record: TurnRecord, messages: list[Message]) -> Iterator[str]:
    from .lookup import date_text
    from .rendering import clean, summary_facts

    facts = {
        "turn": record.turn_id,
        "session": record.session_id,
        "agent": record.agent_id,
        "state": record.state,
        "created": date_text(record.created_at),
    }
    models = {message.model for message in messages if message.model}
    if models:
        facts["model"] = ", ".join(sorted(models))
    if record.summary is not None:
        facts["work"] = summary_facts(record.summary)
        facts["ended by"] = record.summary.termination.kind
    if record.error is not None:
        facts["error"] = f"{record.error.message} ({record.error.kind})"
    for name, value in facts.items():
        yield f"{name:9} {value}"
    answers = [message.text for message in messages if message.role == "assistant" and message.text]
    if answers:
        yield ""
        yield clean(answers[-1])


def _event_lines(kept: list[ChannelEvent], as_json: bool) -> Iterator[str]:
    import msgspec

    from turnmill.protocol.codec import event_to_dict

    begin = kept[0].at_ms if kept else 0
    for raw, event in _decoded(kept):
        if as_json:
            yield msgspec.json.encode({"seq": raw.number, "at": raw.at_ms / 1000, **event_to_dict(event)}).decode()
        else:
            fields = event_to_dict(event)
            del fields["type"]
            yield f"{raw.number:5} {(raw.at_ms - begin) / 1000:9.3f} s  {event.type:24} {_brief(fields)}"


def _decoded(kept: list[ChannelEvent]) -> Iterator[tuple[ChannelEvent, Event]]:
    from turnmill.protocol.codec import Unreadable, event_from_wire

    for raw in kept:
        event = event_from_wire(raw.kind, raw.body)
        if not isinstance(event, Unreadable):
            yield raw, event


def _brief(fields: dict[str, object]) -> str:
    from .rendering import arguments_text, clean, shortened

    return shortened(clean(arguments_text(fields)), 160)


def _message_lines(messages: list[Message], as_json: bool) -> Iterator[str]:
    import msgspec

    from .rendering import call_text, clean, result_text, shortened

    for message in messages:
        if as_json:
            yield msgspec.json.encode(message, enc_hook=repr).decode()
            continue
        if message.text:
            yield clean(f"{message.role}: {message.text}")
        for call in message.tool_calls:
            yield clean(f"{message.role}: → {call_text(call)}")
        for result in message.tool_results:
            mark = "✗" if result.is_error else "←"
            yield clean(f"{message.role}: {mark} {result.tool_name}: {shortened(result_text(result), 400)}")


def _timeline(record: TurnRecord, kept: list[ChannelEvent], as_json: bool) -> Iterator[str]:
    import msgspec
    from rich.console import Console

    from .timeline import draw, spans_of

    spans = spans_of(list(_decoded(kept)))
    if as_json:
        yield from (msgspec.json.encode(span).decode() for span in spans)
        return
    yield f"turn {record.turn_id}  {record.agent_id}  {record.state}"
    yield from draw(spans, Console().width)
