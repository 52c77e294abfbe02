"""What went wrong, as providers say it: a status, headers and some JSON, HTML or text turned into an `ErrorInfo`.

Providers report the same problem as an HTTP status, as a number or a word inside a body of status 200, or only in
prose. `read_problem` gathers what was said, `error_info` decides what it means and whether another attempt may help.
"""

from __future__ import annotations

import email.utils
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from turnmill.protocol.content import ErrorInfo
from turnmill.protocol.errors import ErrorKind

MESSAGE_LENGTH_MAX = 500
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_KIND_BY_STATUS = {
    401: ErrorKind.AUTHENTICATION,
    403: ErrorKind.AUTHENTICATION,
    402: ErrorKind.PROVIDER_ERROR,
    408: ErrorKind.TIMEOUT,
    409: ErrorKind.PROVIDER_ERROR,
    425: ErrorKind.PROVIDER_ERROR,
    429: ErrorKind.RATE_LIMITED,
    503: ErrorKind.OVERLOADED,
    504: ErrorKind.TIMEOUT,
    529: ErrorKind.OVERLOADED,
}
_CONTEXT_OVERFLOW = re.compile(
    r"context[_ ](length|window|size|limit)|exceed_context|max(imum)? (context|prompt length)"
    r"|(prompt|input|request) (is )?too long|max_new_tokens`? must be|too many (input )?tokens|reduce the length|input token count"
)
_CONTENT_FILTER = re.compile(
    r"content[_ ](filter|policy|management policy)|responsible_?ai|moderation|flagged|safety[_ ](system|filter)"
)
_MEANING_BY_WORD: tuple[tuple[re.Pattern[str], ErrorKind, bool], ...] = (
    (re.compile(r"insufficient_quota|billing|credit balance"), ErrorKind.RATE_LIMITED, False),
    (re.compile(r"tool_use_failed"), ErrorKind.PROVIDER_ERROR, True),
    (re.compile(r"rate_?limit|throttl|too_many_requests|resource_exhausted"), ErrorKind.RATE_LIMITED, True),
    (re.compile(r"overloaded|unavailable|capacity"), ErrorKind.OVERLOADED, True),
    (re.compile(r"timeout|timed_out|deadline"), ErrorKind.TIMEOUT, True),
    (re.compile(r"authentication|permission|api_key|unauthorized"), ErrorKind.AUTHENTICATION, False),
    (re.compile(r"invalid_request|bad_request|not_found|invalid_argument"), ErrorKind.BAD_REQUEST, False),
)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider said about a failure. `code` and `type` are its words for programs; any of it may be missing."""

    message: str = ""
    code: str = ""
    type: str = ""
    status: int | None = None


def read_problem(value: Any) -> Problem:
    """The problem that a decoded error body or error event tells of, whatever its form."""
    match value:
        case [first, *_]:
            return read_problem(first)
        case {"error": dict(error)}:
            return _read_error_object(error)
        case {"error": str(message)}:
            return Problem(message=message, code=_word(value.get("code")))
        case dict():
            return _read_error_object(value)
        case str():
            return Problem(message=value)
        case _:
            return Problem()


def read_problem_body(body: bytes) -> Problem:
    """The problem that the body of a failed request tells of: JSON of any form, an HTML page, or text."""
    try:
        return read_problem(msgspec.json.decode(body))
    except (msgspec.DecodeError, RecursionError):
        return Problem(message=_plain_text(body.decode("utf-8", "replace")))


def error_info(
    problem: Problem, status: int | None = None, headers: Mapping[str, str] | None = None, now: float = 0.0
) -> ErrorInfo:
    """What the problem means. `status` is the response's where it is no success; `now` is Unix time in seconds."""
    status = status if status is not None else problem.status
    kind, retryable = _meaning(problem, status)
    return ErrorInfo(
        kind=kind,
        message=_sentence(problem, status),
        retryable=retryable,
        retry_after_seconds=retry_after_seconds(headers or {}, now),
        status=status,
    )


def retry_after_seconds(headers: Mapping[str, str], now: float) -> float | None:
    """How long the provider asks to wait: `retry-after-ms`, else `retry-after` in seconds or as a date."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    text = headers.get("retry-after")
    seconds = _number(text)
    if seconds is None and text:
        seconds = _seconds_until(text, now)
    return None if seconds is None else max(0.0, seconds)


def shorten(text: str, length_max: int = MESSAGE_LENGTH_MAX) -> str:
    """`text` on one line, cut to a length that an event or a log line can carry."""
    text = " ".join(text.split())
    return text if len(text) <= length_max else text[: length_max - 3] + "..."


def _read_error_object(error: dict[str, Any]) -> Problem:
    code = error.get("code")
    return Problem(
        message=_read_message(error),
        code=_word(code),
        type=_word(error.get("type")),
        status=_status(error.get("status_code")) or _status(code) or _status(error.get("status")),
    )


def _read_message(error: dict[str, Any]) -> str:
    """The message, and after it what a relay passes on of its provider, or what the model said that was refused."""
    message = error.get("message") or error.get("detail") or error.get("msg") or ""
    if not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    metadata = error.get("metadata")
    more = metadata.get("raw") if isinstance(metadata, dict) else error.get("failed_generation")
    return f"{message}: {more}" if isinstance(more, str) and more else message


def _meaning(problem: Problem, status: int | None) -> tuple[ErrorKind, bool]:
    words = f"{problem.code} {problem.type}".lower()
    prose = f"{words} {problem.message.lower()}"
    if status in (None, 400, 413, 422, 500) and _CONTEXT_OVERFLOW.search(prose):
        return ErrorKind.CONTEXT_OVERFLOW, False
    if status in (None, 400, 403, 422, 451) and _CONTENT_FILTER.search(prose):
        return ErrorKind.CONTENT_FILTER, False
    by_word = next(((kind, again) for pattern, kind, again in _MEANING_BY_WORD if pattern.search(words)), None)
    if status is None:
        return by_word or (ErrorKind.PROVIDER_ERROR, True)
    if "insufficient_quota" in words or "tool_use_failed" in words:
        return by_word or (ErrorKind.PROVIDER_ERROR, True)
    return _meaning_of_status(status)


def _meaning_of_status(status: int) -> tuple[ErrorKind, bool]:
    fallback = ErrorKind.PROVIDER_ERROR if status >= 500 else ErrorKind.BAD_REQUEST
    return _KIND_BY_STATUS.get(status, fallback), status >= 500 or status in _RETRYABLE_STATUSES


def _sentence(problem: Problem, status: int | None) -> str:
    message = shorten(problem.message) or "the provider gave no reason"
    words = [str(status) if status is not None else "", problem.code if problem.code != str(status) else ""]
    prefix = " ".join(word for word in words if word)
    return f"{prefix}: {message}" if prefix else message


def _plain_text(text: str) -> str:
    """The words of an HTML page; any other text as it is."""
    if "<html" not in text[:1000].lower() and "<!doctype" not in text[:1000].lower():
        return text
    text = re.sub(r"(?is)<(script|style)\b.*?</\1>|<head\b[^>]*>(?=.*<h1)|<!--.*?-->", " ", text)
    return re.sub(r"(?s)<[^>]*>", " ", text)


def _word(value: Any) -> str:
    return shorten(str(value), 100) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _status(value: Any) -> int | None:
    """`value` where it is an HTTP error status, written as a number or in digits."""
    if isinstance(value, str) and value.isdecimal() and len(value) == 3:
        value = int(value)
    return value if isinstance(value, int) and 400 <= value <= 599 else None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _seconds_until(text: str, now: float) -> float | None:
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime.fromtimestamp(now, UTC)).total_seconds()
