"""What takes bytes from outside, as functions of bytes: each raises where the code does what it must not.

Tests feed them with hypothesis, `scripts/chaos fuzz` with atheris, which looks for inputs that reach new code.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from turnmill.protocol import codec
from turnmill.protocol.blob_refs import put_back, refs_of, take_out
from turnmill.protocol.content import BlobRef
from turnmill.protocol.dead_letters import _letter_fields
from turnmill.protocol.errors import CodecError, ConfigurationError, MessageTooLarge
from turnmill.protocol.keys import partition_of_turn, submission_ms, valid_name, valid_session_id
from turnmill.protocol.settings import load_settings
from turnmill.protocol.streams import parse_publication, publication_header
from turnmill.runtime.door import refusal_of
from turnmill.runtime.fleet import described
from turnmill.workers.providers.base import ProviderError, ProviderRequest
from turnmill.workers.providers.http_errors import error_info, read_problem_body
from turnmill.workers.providers.openai_chat import BodyReader
from turnmill.workers.providers.openai_chat_reply import Reply
from turnmill.workers.providers.sse import SseEvent, SseParser

Target = Callable[[bytes], None]
CODECS = (codec.MESSAGE_CODEC, codec.TASK_CODEC, codec.ANSWER_CODEC, codec.EVENT_CODEC)


def envelope(data: bytes) -> None:
    """An entry of a stream: a message, or a value that says why it is none. What was read can be written and read again."""
    head, _, body = data.partition(b"\n")
    names = head.split(b" ")
    fields = {b"t": names[0], b"d": body}
    for name in names[1:4]:
        fields[name[:1] or b"v"] = name[1:]
    for each in CODECS:
        message = each.decode_fields(fields)
        if isinstance(message, codec.Unreadable):
            assert message.reason
            continue
        for wire in ("json", "msgpack"):
            try:
                written = codec.encode_body(message, wire)
            except (TypeError, ValueError, OverflowError, RecursionError, CodecError):
                continue  # JSON's integers and MessagePack's differ; who writes checks before
            again = each.decode_fields({**fields, b"d": written})
            assert not isinstance(again, codec.Unreadable), again
    codec.read_address(body)
    refusal_of(fields, "internal")
    _letter_fields(fields)


def message(data: bytes) -> None:
    """An entry of a transcript, with its large values out and in."""
    try:
        decoded = codec.decode_message(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    put_back(decoded, dict.fromkeys(refs_of(decoded), data[:50]))
    shelf: dict[str, bytes] = {}

    def store(value: bytes, media_type: str | None) -> BlobRef:
        ref = BlobRef(key=f"blob:{len(shelf)}", bytes=len(value), media_type=media_type)
        shelf[ref.key] = value
        return ref

    if not refs_of(decoded):
        try:
            out = take_out(decoded, 10, store)
        except (TypeError, ValueError, RecursionError):
            return
        assert repr(put_back(out, shelf)) == repr(decoded)  # equality is not for NaN


def publication(data: bytes) -> None:
    """A message of pub/sub: events, or a `ValueError`."""
    try:
        events = parse_publication(data)
    except (ValueError, IndexError, OverflowError):
        return
    if events:
        kinds = [event.kind.decode("latin-1") for event in events]
        assert publication_header(kinds, [event.body for event in events])


def events(data: bytes) -> None:
    """Server-sent events in any pieces are the events of the whole."""
    cut = data[:1][0] if data else 0
    text = data[1:]
    size = cut % 17 + 1
    whole = _read(SseParser(1000), [text])
    pieces = _read(SseParser(1000), [text[at : at + size] for at in range(0, len(text), size)])
    assert whole == pieces or None in (whole, pieces)


def _read(parser: SseParser, chunks: list[bytes]) -> list[SseEvent] | None:
    found = []
    try:
        for chunk in chunks:
            found += parser.feed(chunk)
        return found + parser.close()
    except MessageTooLarge:
        return None  # when it is noticed depends on the pieces


def answer(data: bytes) -> None:
    """The body of a provider's answer: live events, or a `ProviderError`. In pieces it tells the same text."""
    said = set()
    for size in (len(data) or 1, 7):
        reply = Reply(ProviderRequest(model="m", messages=[], turn_id="t", session_id="s", step_number=1), "openai")
        try:
            text = "".join(_live_text(reply, [data[at : at + size] for at in range(0, len(data), size)]))
            msgspec.msgpack.encode(reply.completed().message)
            said.add(text)
        except ProviderError as error:
            assert error.info.kind
    assert len(said) <= 1, said


def _live_text(reply: Reply, chunks: list[bytes]) -> Iterator[str]:
    """What a provider's adapter makes of the chunks of a body."""
    reader = BodyReader(reply)
    for chunk in (*chunks, None):
        if reply.is_done:
            return
        for event in reader.close() if chunk is None else reader.feed(chunk):
            yield getattr(event, "text", None) or ""
        if reply.failure is not None:
            raise reply.failure


def refusal(data: bytes) -> None:
    """The body and the headers of a failed request."""
    head, _, body = data.partition(b"\n")
    text = head.decode("latin-1")
    info = error_info(read_problem_body(body), 429, {"retry-after": text, "retry-after-ms": text[::-1]}, 1e9)
    assert info.retry_after_seconds is None or info.retry_after_seconds >= 0
    assert len(info.message) < 2000
    msgspec.json.encode(info)


def registration(data: bytes) -> None:
    """What a process wrote into the registry of workers."""
    assert described("name", data).id == "name"


def names(data: bytes) -> None:
    """Ids of turns and sessions, and names, from anywhere."""
    text = data.decode("utf-8", "surrogateescape")
    valid_name(text)
    valid_session_id(text)
    partition_of_turn(text)
    submission_ms(text)


def settings_file(data: bytes) -> None:
    """A `turnmill.toml`: settings, or one line that says what is wrong with it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="tm-") as directory:
        (Path(directory) / "turnmill.toml").write_bytes(data)
        os.chdir(directory)
        try:
            load_settings().masked()
        except ConfigurationError as error:
            assert str(error)
            assert "\n" not in str(error)
        finally:
            os.chdir(before)


TARGETS: dict[str, Target] = {
    "envelope": envelope,
    "message": message,
    "publication": publication,
    "events": events,
    "answer": answer,
    "refusal": refusal,
    "registration": registration,
    "names": names,
    "settings": settings_file,
}

_TASK = (b'{"session_id":"s","turn_id":"t0-01arz3ndektsv4rrffq69g5fav","call":"1.0","attempt":1,"token":"x","tool":"a",'
         b'"tool_call_id":"c","arguments":{"a":[1,2.5,null,{"$bytes":"AA=="}]},"agent_id":"g","step_number":1,'
         b'"idempotency_key":"k","timeout_seconds":1,"start_by_ms":1,"deadline_ms":2}')  # fmt: skip
_REPLY = (b'{"session_id":"s","turn_id":"t0-01arz3ndektsv4rrffq69g5fav","call":"1.0","attempt":1,"token":"x","result":'
          b'{"tool_call_id":"c","tool_name":"a","result":{"x":1},"blob":{"key":"blob:1","bytes":3}}}')  # fmt: skip
_CHUNK = (b'data: {"choices":[{"index":0,"delta":{"content":"hi","reasoning_content":"so","tool_calls":[{"index":0,"id":"c",'
          b'"function":{"name":"f","arguments":"{\\"a\\":1}"}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}\n\n'
          b"data: [DONE]\n\n")  # fmt: skip
SEEDS: dict[str, list[bytes]] = {
    "envelope": [b"tool_task v1\n" + _TASK, b"tool_reply\n" + _REPLY, b"start_turn vx zz\n{}", b"tool_reply\n\x81\xa1a\x01",
                 b'text.delta\n{"text":"x","step_number":1}', b'timer_fired\n{"session_id":"s"}'],
    "message": [b'{"role":"user","content":"a text that is longer"}',
                b'{"role":"user","content":[{"type":"text","text":"a text that is longer"},{"type":"image","data":"AAAA","media_type":"i/p"}]}'],
    "publication": [b"1 1700000000000 text.delta 3 turn.finished 2\nabc{}"],
    "events": [b"\x03event: x\r\ndata: a\r\rdata: b\n\n: c\n\n"],
    "answer": [_CHUNK, b'{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}',
               b'data: {"error":{"message":"no","code":429}}\n\n'],
    "refusal": [b'5\n{"error":{"message":"no","type":"rate_limit","code":"x"}}', b"Wed, 21 Oct 2015 07:28:00 GMT\n<html><h1>no</h1>", b"1" + b"9" * 60 + b" Oct 10 7:21\n"],
    "registration": [b'{"id":"a","role":"tools","queues":["tool:x"],"slots":3,"seen_at":1.5,"partitions":[1]}'],
    "names": [b"t0-01arz3ndektsv4rrffq69g5fav", b"s-1/child"],
    "settings": [b'namespace = "x"\npartitions = 4\n[providers.local]\napi = "openai"\nbase_url = "http://a/v1"\n'],
}  # fmt: skip
