"""An answer of /responses, put together from its events.

The answer is a list of items: messages, reasoning, calls of our tools, and whatever the provider does by itself. An item is
known by its place in the list, because some relays change its id from event to event. What matters comes three times (as
deltas, as the finished part, in the finished item) and from some servers only once: what is new of it counts.

Items that are not ours to understand are kept whole, to be sent back, and are never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnmill.protocol.content import Part, ReasoningPart, TextPart, ToolCallPart, Usage

from .answer import Answer, broken, count_of, object_of, text_of
from .base import Completed, Live, ProviderError, ProviderRequest
from .http_errors import Problem, error_info, read_problem, read_problem_body
from .openai_chat_calls import arguments_text
from .openai_chat_chunks import read_cost
from .sse import SseEvent

DONE = b"[DONE]"
ITEM = "item"
"""The key in `ReasoningPart.data` under which an item stands whole."""
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})
_FINISH_BY_REASON = {"max_output_tokens": "length", "max_tokens": "length", "content_filter": "content_filter"}
_decode = msgspec.json.Decoder().decode


class Reply(Answer):
    """One answer as far as it was read. `take` the events, look at `failure` after each, take `completed` at the end."""

    def __init__(self, request: ProviderRequest, provider_name: str) -> None:
        super().__init__(request, provider_name)
        self._items: dict[int, _Item] = {}
        self._finish = ""
        self._refused = False

    def take(self, event: SseEvent) -> list[Live]:
        """What an event of the stream tells watchers."""
        data = event.data.strip()
        if not data or data == DONE or self.is_done:
            return []
        try:
            body = _decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            self.failure = broken(f"an event cannot be read: {error}: {data[:200]!r}")
            return []
        if not isinstance(body, dict):
            return []
        kind = body.get("type") or event.name.decode("utf-8", "replace")
        return list(self._take_event(str(kind), body))

    def take_whole(self, body: bytes) -> list[Live]:
        """The same for an answer that came as one JSON body."""
        try:
            response = _decode(body)
        except (msgspec.DecodeError, RecursionError):
            response = None
        if not isinstance(response, dict) or (response.get("error") and not response.get("output")):
            self.failure = ProviderError(error_info(read_problem_body(body)))
            return []
        return list(self._end(response)) if "output" in response or "status" in response else []

    def completed(self) -> Completed:
        """The whole answer. Raises `ProviderError` where the stream ended before the answer did."""
        if not self.is_done:
            raise self._cut_off(began=bool(self._items), missing="a last event")
        parts = [part for _, item in sorted(self._items.items()) for part in item.parts(self._provider_name)]
        refused = self._refused and self._finish == "stop"
        return self._whole(parts, "refusal" if refused else self._finish)

    # ---- events

    def _take_event(self, kind: str, body: dict[str, Any]) -> Iterator[Live]:
        if kind == "error" or (kind == "" and body.get("error")):
            self._fail(read_problem(body))
            return
        if kind in _ENDS:
            yield from self._end(object_of(body.get("response")), kind)
            return
        match kind.removeprefix("response."):
            case "created" | "in_progress" | "queued":
                self._note_model(object_of(body.get("response")))
            case "output_item.added":
                yield from self._item(body, object_of(body.get("item"))).begin()
            case "output_item.done":
                item = object_of(body.get("item"))
                yield from self._item(body, item).finish(item)
            case "output_text.delta" | "refusal.delta" | "reasoning_text.delta" | "reasoning_summary_text.delta":
                yield from self._item(body).add(_part_key(body), text_of(body.get("delta")))
            case "output_text.done" | "reasoning_text.done" | "reasoning_summary_text.done":
                yield from self._item(body).complete(_part_key(body), text_of(body.get("text")))
            case "refusal.done":
                yield from self._item(body).complete(_part_key(body), text_of(body.get("refusal")))
            case "function_call_arguments.delta" | "custom_tool_call_input.delta":
                yield from self._item(body).add(_ARGUMENTS, text_of(body.get("delta")))
            case "function_call_arguments.done":
                yield from self._item(body).complete(_ARGUMENTS, arguments_text(body.get("arguments")))
            case "custom_tool_call_input.done":
                yield from self._item(body).complete(_ARGUMENTS, text_of(body.get("input")))
            case _:
                return  # events of tools that the provider runs, keep-alives, and what is not invented yet

    def _item(self, body: dict[str, Any], described: dict[str, Any] | None = None) -> _Item:
        """The item at an event's place; without one it belongs to the last item."""
        place = body.get("output_index")
        if not isinstance(place, int):
            place = max(self._items, default=0)
        return self._item_at(place, described, str(body.get("type", "")))

    def _item_at(self, place: int, described: dict[str, Any] | None, event: str = "") -> _Item:
        item = self._items.get(place)
        if item is None:
            described = described or {"type": _kind_of_event(event)}
            item = self._items[place] = self._new_item(described)
        return item

    def _new_item(self, described: dict[str, Any]) -> _Item:
        match described.get("type"):
            case "message":
                return _MessageItem(self)
            case "reasoning":
                return _ReasoningItem(self)
            case "function_call" | "custom_tool_call":
                return _CallItem(self, described)
            case _:
                return _OpaqueItem(self, described)

    def _end(self, response: dict[str, Any], kind: str = "") -> Iterator[Live]:
        self._note_model(response)
        for place, item in enumerate(response.get("output") or ()):
            if isinstance(item, dict):
                yield from self._item_at(place, item).finish(item)
        usage = response.get("usage")
        if isinstance(usage, dict):
            self.usage, self.cost = _read_usage(usage), read_cost(usage) or self.cost
        status = response.get("status") or kind.removeprefix("response.")
        error = response.get("error")
        if status in ("failed", "cancelled") or error:
            problem = read_problem({"error": error}) if error else Problem(message=f"the response was {status}")
            self._fail(problem, retryable=not error)
            return
        if status not in ("completed", "incomplete"):
            return  # of a background response that goes on
        reason = object_of(response.get("incomplete_details")).get("reason")
        self._finish = _FINISH_BY_REASON.get(str(reason), "other") if status == "incomplete" else "stop"
        self.is_done = True

    def _note_model(self, response: dict[str, Any]) -> None:
        model = response.get("model")
        if isinstance(model, str) and model:
            self._model = model

    def refuse(self) -> None:
        self._refused = True


_PartKey = tuple[str, int]
_ARGUMENTS: _PartKey = ("arguments", 0)


class _Item:
    """One item of the answer. A part of it (a text, a summary, arguments) grows by deltas and is completed by what it is as
    a whole."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._texts: dict[_PartKey, list[str]] = {}

    def begin(self) -> Iterator[Live]:
        yield from ()

    def add(self, key: _PartKey, text: str) -> Iterator[Live]:
        if text:
            self._texts.setdefault(key, []).append(text)
            yield from self._tell(key, text)

    def complete(self, key: _PartKey, text: str) -> Iterator[Live]:
        """What deltas have not said. A whole that says something else than they did is not believed."""
        said = "".join(self._texts.get(key, ()))
        if text.startswith(said):
            yield from self.add(key, text[len(said) :])

    def finish(self, item: dict[str, Any]) -> Iterator[Live]:
        yield from ()

    def parts(self, provider_name: str) -> list[Part]:
        return []

    def _tell(self, key: _PartKey, text: str) -> Iterator[Live]:
        yield from ()

    def _joined(self, kind: str, between: str = "") -> str:
        return between.join("".join(texts) for (name, _), texts in sorted(self._texts.items()) if name == kind)


class _MessageItem(_Item):
    def finish(self, item: dict[str, Any]) -> Iterator[Live]:
        for place, part in enumerate(item.get("content") or ()):
            match part:
                case {"type": "output_text" | "text", "text": str(text)}:
                    yield from self.complete(("text", place), text)
                case {"type": "refusal", "refusal": str(text)}:
                    yield from self.complete(("refusal", place), text)

    def parts(self, provider_name: str) -> list[Part]:
        texts = ["".join(texts) for _, texts in sorted(self._texts.items(), key=lambda entry: entry[0][1])]
        return [TextPart(text) for text in texts if text]

    def _tell(self, key: _PartKey, text: str) -> Iterator[Live]:
        if key[0] == "refusal":
            self._reply.refuse()
        yield self._reply.say(text)


class _ReasoningItem(_Item):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._whole: dict[str, Any] = {}

    def finish(self, item: dict[str, Any]) -> Iterator[Live]:
        for place, part in enumerate(item.get("summary") or ()):
            yield from self.complete(("summary", place), text_of(object_of(part).get("text")))
        for place, part in enumerate(item.get("content") or ()):
            yield from self.complete(("reasoning", place), text_of(object_of(part).get("text")))
        if not self._whole and item.get("encrypted_content"):
            yield self._reply.tell_state({ITEM: item})
        self._whole = item

    def parts(self, provider_name: str) -> list[Part]:
        text = self._joined("reasoning") or self._joined("summary", "\n\n")
        data = {ITEM: self._whole} if self._whole else {}
        return [ReasoningPart(text=text, provider=provider_name, data=data)] if text or data else []

    def _tell(self, key: _PartKey, text: str) -> Iterator[Live]:
        yield self._reply.think(text, is_summary=key[0] == "summary")


class _CallItem(_Item):
    def __init__(self, reply: Reply, item: dict[str, Any]) -> None:
        super().__init__(reply)
        self._call = reply.new_call(text_of(item.get("call_id")) or text_of(item.get("id")), text_of(item.get("name")))
        self._told = False

    def begin(self) -> Iterator[Live]:
        if not self._told:
            self._told = True
            yield self._reply.tell_call(self._call)

    def finish(self, item: dict[str, Any]) -> Iterator[Live]:
        self._call.name = self._call.name or text_of(item.get("name"))
        yield from self.begin()
        whole = item.get("input") if item.get("type") == "custom_tool_call" else item.get("arguments")
        yield from self.complete(_ARGUMENTS, arguments_text(whole))

    def parts(self, provider_name: str) -> list[Part]:
        return [ToolCallPart(self._call.finish())]

    def _tell(self, key: _PartKey, text: str) -> Iterator[Live]:
        yield from self.begin()
        self._call.extend("", "", text)
        yield self._reply.tell_arguments(self._call, text)


class _OpaqueItem(_Item):
    """What the provider does by itself. It wants it back as it was."""

    def __init__(self, reply: Reply, item: dict[str, Any]) -> None:
        super().__init__(reply)
        self._whole = item

    def finish(self, item: dict[str, Any]) -> Iterator[Live]:
        self._whole = item
        yield from ()

    def parts(self, provider_name: str) -> list[Part]:
        return [ReasoningPart(provider=provider_name, data={ITEM: self._whole})] if self._whole.get("id") else []


def _part_key(body: dict[str, Any]) -> _PartKey:
    """Which part of its item an event is about."""
    kind = str(body.get("type", ""))
    if "summary" in kind:
        return "summary", _place(body.get("summary_index"))
    name = "refusal" if "refusal" in kind else "reasoning" if "reasoning" in kind else "text"
    return name, _place(body.get("content_index"))


def _kind_of_event(event: str) -> str:
    if "function_call" in event or "custom_tool_call" in event:
        return "function_call"
    if "reasoning" in event:
        return "reasoning"
    return "message" if "text" in event or "refusal" in event else ""


def _place(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _read_usage(value: dict[str, Any]) -> Usage:
    taken, given = object_of(value.get("input_tokens_details")), object_of(value.get("output_tokens_details"))
    input_tokens, output_tokens = count_of(value.get("input_tokens")), count_of(value.get("output_tokens"))
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=count_of(taken.get("cached_tokens")),
        cache_write_tokens=count_of(taken.get("cache_write_tokens")),
        reasoning_tokens=count_of(given.get("reasoning_tokens")),
        total_tokens=count_of(value.get("total_tokens")) or input_tokens + output_tokens,
    )
