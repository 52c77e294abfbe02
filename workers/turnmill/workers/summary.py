"""A conversation summed up by a model: what it is given, and what is done where that is too long even for it.

The conversation goes to the model as text in one message: it needs no tools then, and no provider's rules about what may
stand behind what. Where it does not fit, its halves are summed up one after the other, the second with the first's
summary before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from turnmill.protocol.content import ErrorInfo, Message, ReasoningPart, TextPart, ToolCallPart, ToolResultPart
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.logs import get_logger
from turnmill.protocol.specs import RetryPolicy

from .compaction import (
    SUMMARY,
    Entry,
    Shortening,
    View,
    replaced_by_cut,
    size_of,
    trim_text,
    value_text,
    view_of,
    with_summary,
)
from .providers.base import Completed, ProviderError, ProviderRequest

_log = get_logger(__name__)
INSTRUCTIONS = (
    "Sum up the conversation you are given, so that an assistant can go on with it without having read it. Keep what the "
    "user wants and has decided, facts, names, numbers, identifiers and paths as they are written, what was done with "
    "which result, what failed, and what is still open. Leave out pleasantries and what was superseded. Write plain "
    "text, in the language of the conversation, and nothing but the summary."
)
_PIECE_BYTES_MIN = 1000
"""A single message is not shortened below that to make it fit."""

Ask = Callable[[ProviderRequest], Awaitable[Completed]]
"""Makes one provider call."""


class Summarizer:
    """Sums up with one model. `ask` makes each call; `request` has what all of them share."""

    def __init__(self, ask: Ask, request: ProviderRequest, retry: RetryPolicy, instructions: str | None = None) -> None:
        self._ask = ask
        self._request = msgspec.structs.replace(request, system=instructions or INSTRUCTIONS)
        self._retry = retry

    async def sum_up(self, messages: Iterable[Message], bytes_max: int) -> str:
        """The summary. Tool results are given to the model with `bytes_max` bytes at the most.

        Raises `ProviderError` where the model fails, or where even a single message is too long for it.
        """
        return await self._sum_up([_told(message, bytes_max) for message in messages], "")

    async def _sum_up(self, pieces: list[str], before: str) -> str:
        try:
            return await self._attempts("\n\n".join([before, *pieces] if before else pieces))
        except ProviderError as error:
            if error.info.kind != ErrorKind.CONTEXT_OVERFLOW:
                raise
            if len(pieces) > 1:
                half = len(pieces) // 2
                first = await self._sum_up(pieces[:half], before)
                return await self._sum_up(pieces[half:], f"[summary of what came before]\n{first}")
            length = len(pieces[0].encode())
            if length <= _PIECE_BYTES_MIN:
                raise
            return await self._sum_up([trim_text(pieces[0], length // 2)], before)

    async def _attempts(self, text: str) -> str:
        request = msgspec.structs.replace(self._request, messages=[Message(role="user", content=text)])
        delay_seconds, attempt = self._retry.initial_delay_seconds, 1
        while True:
            try:
                return _text_of(await self._ask(msgspec.structs.replace(request, attempt=attempt)))
            except ProviderError as error:
                if not error.info.retryable or attempt >= self._retry.max_attempts:
                    raise
                await asyncio.sleep(max(delay_seconds, error.info.retry_after_seconds or 0))
            attempt += 1
            delay_seconds = min(delay_seconds * self._retry.backoff, self._retry.max_delay_seconds)


def _text_of(completed: Completed) -> str:
    text = completed.message.text.strip()
    if not text:
        raise ProviderError(ErrorInfo(kind=ErrorKind.PROVIDER_ERROR, message="the summarizer gave an empty summary"))
    return text


def _told(message: Message, bytes_max: int) -> str:
    """A message as the summarizer reads it."""
    speaker = "summary of what came before" if message.metadata.get("turnmill") == SUMMARY else message.role
    if isinstance(message.content, str):
        return f"[{speaker}]\n{message.content}"
    lines: list[str] = []
    for part in message.content:
        match part:
            case TextPart(text=text):
                lines.append(text)
            case ToolCallPart(tool_call=call):
                lines.append(f"calls {call.name}({msgspec.json.encode(call.arguments).decode()})")
            case ToolResultPart(tool_result=result):
                outcome = "error" if result.is_error else "result"
                if result.content is None:
                    text = value_text(result)
                else:
                    text = "\n".join(_named(item) for item in result.content)
                lines.append(f"{outcome} of {result.tool_name}: {trim_text(text, bytes_max)}")
            case ReasoningPart():
                pass  # of no use to another model, and not meant for it
            case _:
                lines.append(_named(part))
    return f"[{speaker}]\n" + "\n".join(lines)


def _named(part: object) -> str:
    """A text, or a word about an image or a file."""
    if isinstance(part, TextPart):
        return part.text
    return f"({getattr(part, 'filename', None) or getattr(part, 'media_type', None) or 'an image'})"


async def shortened(
    entries: Sequence[Entry], plan: Shortening, turn_id: str, summarizer: Summarizer, bytes_max: int
) -> View | None:
    """The view that a plan leads to; None where that is not shorter than what there was.

    A summarizer that fails raises its `ProviderError`, unless trimming alone has made the conversation shorter.
    """
    made, is_trimmed = plan.entries, size_of(plan.entries) < size_of(entries)
    if plan.cut is not None:
        replaced = replaced_by_cut(made, plan.cut, turn_id)
        try:
            text = await summarizer.sum_up([entry.message for entry in replaced], bytes_max)
        except ProviderError as error:
            _log.warning("no summary was made", turn=turn_id, error=str(error), trimmed=is_trimmed)
            if not is_trimmed:
                raise
        else:
            made = with_summary(made, plan.cut, turn_id, text)
    return view_of(made) if size_of(made) < size_of(entries) else None
