"""A conversation made shorter for the model: which entries of the session's lists stand for it from now on.

The transcript stays whole; what changes is a *view*, segments of lists. Two ways: tool results above a number of bytes
are replaced by trimmed copies, and everything before a *cut* by one message that sums it up. A cut never parts a call
from its results, nor a question from the step that begins to answer it; what the running turn was asked stays word for
word. All of it is pure; `summary.py` has the model write the summary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import msgspec

from turnmill.protocol.content import FilePart, ImagePart, Message, OutputPart, TextPart, ToolResult, ToolResultPart
from turnmill.protocol.messages import Segment
from turnmill.protocol.specs import Compaction

TRANSCRIPT, REPLACEMENTS, NEW = 0, 1, 2
"""The lists of a view. NEW are the replacements that come with it."""
SUMMARY = "summary"
_ENOUGH = 0.5
_GAP_BYTES_MAX = 8 * 1024
"""Entries between two new ones that are not larger are copied, because every segment costs a read at every step."""
_TRIMMED_BYTES_MIN = 64
_ASKED_BYTES_MAX = 256 * 1024
"""What the running turn was asked is copied behind the summary up to that size: together they stand for all before the cut,
so that a conversation that goes back to the turn's beginning leaves the summary out, which knows the rest of the turn."""
_SUMMARY_HEAD = "Summary of the conversation so far, in place of its messages:\n\n"


class Entry(msgspec.Struct, frozen=True):
    """A message and where it stands: entry `index` of `list`. New ones have no place yet."""

    message: Message
    list: int = NEW
    index: int = -1

    @property
    def is_new(self) -> bool:
        return self.list == NEW


class View(msgspec.Struct, frozen=True):
    """What stands for a conversation: segments, and the messages that its segments of list `NEW` refer to."""

    segments: list[Segment]
    replacements: list[Message]


def entries_of(messages: Sequence[Message], view: Iterable[Segment], view_end: int) -> list[Entry]:
    """The messages of a conversation with their places: those of `view`, then the transcript's from `view_end` on."""
    places = [(kind, index) for kind, first, end in view for index in range(first, end)]
    behind = len(messages) - len(places)
    places += [(TRANSCRIPT, index) for index in range(view_end, view_end + behind)]
    return [Entry(message, kind, index) for message, (kind, index) in zip(messages, places, strict=True)]


def view_of(entries: Sequence[Entry]) -> View:
    """The view that shows these entries."""
    segments: list[Segment] = []
    replacements: list[Message] = []
    for entry in _with_gaps_closed(entries):
        kind, index = entry.list, entry.index
        if entry.is_new:
            index = len(replacements)
            replacements.append(entry.message)
        if segments and segments[-1][0] == kind and segments[-1][2] == index:
            segments[-1] = (kind, segments[-1][1], index + 1)
        else:
            segments.append((kind, index, index + 1))
    return View(segments, replacements)


def size_of(entries: Iterable[Entry]) -> int:
    """Bytes of the messages as they are written."""
    return sum(len(msgspec.json.encode(entry.message)) for entry in entries)


# --- trimming


def trim(entries: Sequence[Entry], bytes_max: int, keep_steps: int) -> list[Entry]:
    """The entries with tool results above `bytes_max` trimmed, but for those of the newest `keep_steps` steps.

    What had nothing to trim is the same entry as before.
    """
    end = newest_steps(entries, keep_steps)
    return [_trimmed(entry, bytes_max) if number < end else entry for number, entry in enumerate(entries)]


def newest_steps(entries: Sequence[Entry], steps: int) -> int:
    """Where the last `steps` steps begin: at the model's message of the first of them."""
    start = len(entries)
    for number in range(len(entries) - 1, -1, -1):
        if steps <= 0:
            break
        if entries[number].message.role == "assistant":
            start = number
            steps -= 1
    return start if steps <= 0 else 0


def trim_text(text: str, bytes_max: int) -> str:
    """A text of at most `bytes_max` bytes (or 64): its head, its tail, and a note of how much was left out between them."""
    data = text.encode()
    bytes_max = max(bytes_max, _TRIMMED_BYTES_MIN)
    if len(data) <= bytes_max:
        return text
    room = bytes_max - len(_note(len(data)))
    head, tail = data[: room - room // 3], data[len(data) - room // 3 :]
    shown_head, shown_tail = head.decode(errors="ignore"), tail.decode(errors="ignore")
    left_out = len(data) - len(shown_head.encode()) - len(shown_tail.encode())
    return f"{shown_head}{_note(left_out)}{shown_tail}"


def _note(left_out: int) -> str:
    return f"\n[... {left_out} bytes left out ...]\n"


def _trimmed(entry: Entry, bytes_max: int) -> Entry:
    message = entry.message
    if isinstance(message.content, str) or not message.tool_results:
        return entry
    parts = [_trimmed_part(part, bytes_max) if isinstance(part, ToolResultPart) else part for part in message.content]
    if all(new is old for new, old in zip(parts, message.content, strict=True)):
        return entry
    return Entry(msgspec.structs.replace(message, content=parts))


def _trimmed_part(part: ToolResultPart, bytes_max: int) -> ToolResultPart:
    result = part.tool_result
    if result.content is not None:
        content = _trimmed_content(result.content, bytes_max)
        same = all(new is old for new, old in zip(content, result.content, strict=True))
        return part if same else ToolResultPart(msgspec.structs.replace(result, content=content))
    text = value_text(result)
    shortened = trim_text(text, bytes_max)
    return part if shortened == text else ToolResultPart(msgspec.structs.replace(result, result=shortened))


def _trimmed_content(content: list[OutputPart], bytes_max: int) -> list[OutputPart]:
    """Each text has its share; images and files that come with their data give way to a word about them."""
    texts = sum(isinstance(part, TextPart) for part in content) or 1
    trimmed: list[OutputPart] = []
    for part in content:
        match part:
            case TextPart(text=text):
                shortened = trim_text(text, bytes_max // texts)
                trimmed.append(part if shortened == text else TextPart(shortened))
            case ImagePart(data=data) | FilePart(data=data) if data is not None and len(data) > bytes_max:
                trimmed.append(TextPart(f"[{part.media_type or 'image'} of {len(data)} bytes, left out]"))
            case _:
                trimmed.append(part)
    return trimmed


def value_text(result: ToolResult) -> str:
    """A result's value as text."""
    return result.result if isinstance(result.result, str) else msgspec.json.encode(result.result).decode()


# --- what to do


class Urgency(IntEnum):
    """How much has to be given up: the agent asks for it in good time, or a provider has refused the conversation, or has
    refused it again."""

    EARLY = 0
    REFUSED = 1
    REFUSED_AGAIN = 2


class Shortening(msgspec.Struct, frozen=True):
    """Entries trimmed, and where a summary is to replace what comes before."""

    entries: list[Entry]
    cut: int | None = None


def plan_shortening(entries: Sequence[Entry], policy: Compaction, turn_id: str, urgency: Urgency) -> Shortening | None:
    """How to shorten a conversation, with as little loss as does it: by how much is not known, so half is aimed at.

    Old tool results go first, then those of the newest steps, which stay in an `EARLY` call, then what is before a cut. None
    where nothing is left to shorten.
    """
    total = size_of(entries)
    trimmed = trim(entries, policy.tool_output_bytes, policy.keep_steps)
    if urgency is not Urgency.REFUSED_AGAIN and size_of(trimmed) <= total * _ENOUGH:
        return Shortening(trimmed)
    if urgency is not Urgency.EARLY:
        trimmed = trim(entries, policy.tool_output_bytes, 0)
        if urgency is Urgency.REFUSED and size_of(trimmed) <= total * _ENOUGH:
            return Shortening(trimmed)
    if policy.summarizer is not None:
        cut = choose_cut(trimmed, turn_id, *_CUTS[urgency](policy.keep_steps))
        if cut is not None:
            return Shortening(trimmed, cut)
    return Shortening(trimmed) if size_of(trimmed) < total else None


# Which numbers of steps a cut may leave, the share of all bytes that it should replace, and that it must.
_CUTS: dict[Urgency, Callable[[int], tuple[Sequence[int], float, float]]] = {
    Urgency.EARLY: lambda keep_steps: ((keep_steps,), 0.5, 0.1),
    Urgency.REFUSED: lambda keep_steps: (range(keep_steps, -1, -1), 0.5, 0.1),
    Urgency.REFUSED_AGAIN: lambda _: ((0,), 1.0, 0.0),
}


# --- cutting


def cut_points(entries: Sequence[Entry]) -> list[int]:
    """Where what comes before may be replaced: behind an answer, behind the last result of a step's calls, or behind a turn
    that ended without either."""
    points: list[int] = []
    open_calls = 0
    for number, entry in enumerate(entries, start=1):
        message = entry.message
        if message.role == "assistant":
            open_calls = len(message.tool_calls)
        elif message.role == "tool":
            open_calls -= len(message.tool_results)
        elif number == len(entries) or entries[number].message.turn_id == message.turn_id:
            continue
        if open_calls <= 0:
            points.append(number)
    return points


def choose_cut(
    entries: Sequence[Entry], turn_id: str, steps: Sequence[int], share_wanted: float, share_least: float
) -> int | None:
    """The cut that leaves the newest steps, the first number of `steps` with which it replaces `share_wanted` of all bytes;
    else the one that replaces most. None where that is below `share_least`, or nothing but an old summary."""
    points, total = cut_points(entries), size_of(entries)
    best, most = None, 0
    for keep in steps:
        end = newest_steps(entries, keep)
        cut = max((point for point in points if point <= end), default=0)
        replaced = replaced_by_cut(entries, cut, turn_id)
        size = size_of(replaced) if any(not _is_summary(entry) for entry in replaced) else 0
        if size and size >= share_wanted * total:
            return cut
        if size > most and size >= share_least * total:
            best, most = cut, size
    return best


def _is_summary(entry: Entry) -> bool:
    return entry.message.metadata.get("turnmill") == SUMMARY


def replaced_by_cut(entries: Sequence[Entry], cut: int, turn_id: str) -> list[Entry]:
    """What a summary stands for: the entries before the cut, but for what the running turn was asked."""
    kept = set(_asked(entries, cut, turn_id))
    return [entry for number, entry in enumerate(entries[:cut]) if number not in kept]


def with_summary(entries: Sequence[Entry], cut: int, turn_id: str, text: str) -> list[Entry]:
    """The entries with a summary in place of those before the cut."""
    summary = Message(role="user", content=_SUMMARY_HEAD + text, metadata={"turnmill": SUMMARY})
    asked = [entries[number] for number in _asked(entries, cut, turn_id)]
    if size_of(asked) <= _ASKED_BYTES_MAX:
        asked = [Entry(each.message) for each in asked]
    return [Entry(summary), *asked, *entries[cut:]]


def _asked(entries: Sequence[Entry], cut: int, turn_id: str) -> list[int]:
    """What the running turn was asked before the cut, steering included; not a history that it was started with."""
    asked: list[int] = []
    for number in range(cut - 1, -1, -1):
        message = entries[number].message
        of_turn = message.turn_id == turn_id and bool(turn_id)
        if message.role in ("user", "system"):
            if of_turn and "turnmill" not in message.metadata:
                asked.append(number)
        elif not of_turn or message.step is None:
            break
    return asked[::-1]


def _with_gaps_closed(entries: Sequence[Entry]) -> list[Entry]:
    """Small entries between new ones copied, so that one segment holds them all."""
    closed: list[Entry] = []
    gap: list[Entry] = []
    for entry in entries:
        if not entry.is_new:
            gap.append(entry)
            continue
        if gap and closed and size_of(gap) <= _GAP_BYTES_MAX:
            gap = [Entry(each.message) for each in gap]
        closed += [*gap, entry]
        gap = []
    return [*closed, *gap]
