"""The body of a Messages request, from a transcript.

Thinking, blocks of tools that the provider runs, citations and the like go back as they came, to the provider that wrote
them; another one gets the text, the calls and their results alone.

What does not change comes first (tools, system prompt, the conversation so far), and three marks tell the provider to keep
it: behind the system prompt, and behind the last two messages of the user's side, so that each step reads what the step
before has written. The option `cache_control` takes over: any value goes into the request, None turns caching off.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from turnmill.protocol.content import ErrorInfo, Message
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.specs import Reasoning, ToolSpec

from .anthropic_content import CONTAINER, build_messages
from .anthropic_models import Model, model_named
from .anthropic_output import OutputWay, closed_schema, output_way, prompt_for
from .base import ProviderError, ProviderRequest
from .format import without_none

Json: TypeAlias = dict[str, Any]

_BUDGET_BY_EFFORT = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16_384, "xhigh": 32_000}
_ANSWER_TOKENS = 16_000
_ANSWER_TOKENS_MIN = 4096
_KEPT: Json = {"type": "ephemeral"}
_TRANSLATED = frozenset({"tools", "betas", "parallel_tool_calls", "output_config"})
"""Options that do not simply replace a field."""


def answer_tool(request: ProviderRequest) -> str | None:
    """The tool whose input is the answer, where a schema is asked for in that way."""
    return request.output_name if output_way(request) is OutputWay.TOOL else None


def build_body(request: ProviderRequest, provider_name: str) -> Json:
    """The request's body. The request's options come last and win, an option of None leaves the field out; `tools` are
    added to the agent's, for those that the provider runs.

    Raises `ProviderError` (bad_request) for content that the API cannot carry, and for reasoning that cannot be asked for
    in the way it is, or is asked for twice.
    """
    model, options = model_named(request.model), request.options
    messages = build_messages(request.messages, provider_name)
    thinking, effort = _build_thinking(request, model, provider_name, messages)
    body: Json = {
        "model": request.model,
        "max_tokens": _max_tokens(model, thinking),
        "tools": _build_tools(request) or None,
        "tool_choice": _build_choice(request),
        "system": _build_system(request),
        "messages": messages,
        "stream": True,
        "thinking": thinking,
        "output_config": _build_output_config(request, effort),
        "container": _container(request.messages, provider_name),
    }
    body.update({name: value for name, value in options.items() if name not in _TRANSLATED})
    if "cache_control" not in options:
        _mark_what_stays(body)
    return without_none(body)


# ---- what stays the same from step to step


def _mark_what_stays(body: Json) -> None:
    """At most three marks; the API takes four."""
    if isinstance(body["system"], list):
        _mark_last(body["system"])
    elif body["system"] is None and body["tools"]:
        _mark_last(body["tools"])
    asked = [message for message in body["messages"] if message["role"] == "user"]
    for message in asked[-2:]:
        _mark_last(message["content"])


def _mark_last(blocks: list[Json]) -> None:
    blocks[-1] = {**blocks[-1], "cache_control": _KEPT}


def _build_system(request: ProviderRequest) -> list[Json] | None:
    texts = [request.system] if request.system and request.system.strip() else []
    if request.output_schema is not None and output_way(request) is OutputWay.WORDS:
        texts.append(prompt_for(request.output_schema))
    return [{"type": "text", "text": text} for text in texts] or None


# ---- tools


def _build_tools(request: ProviderRequest) -> list[Json]:
    tools = [_build_tool(tool) for tool in request.tools]
    if output_way(request) is OutputWay.TOOL:
        text = "Give your final answer by calling this tool, once."
        tools.append({"name": request.output_name, "description": text, "input_schema": request.output_schema})
    if not tools:
        tools = _tools_of_the_past(request.messages)
    return tools + list(request.options.get("tools") or [])


def _build_tool(tool: ToolSpec) -> Json:
    built: Json = {"name": tool.name, "input_schema": {"type": "object", **tool.schema}}
    return {**built, "description": tool.description} if tool.description else built


def _tools_of_the_past(messages: list[Message]) -> list[Json]:
    """A conversation with calls in it is refused without any tools. These are there to be named, not to be called."""
    names = dict.fromkeys(call.name for message in messages for call in message.tool_calls if call.name)
    return [{"name": name, "input_schema": {"type": "object"}} for name in names]


def _build_choice(request: ProviderRequest) -> Json | None:
    choice: Json | None = None
    if output_way(request) is OutputWay.TOOL:
        choice = {"type": "any"}
        if not request.tools or request.tool_choice == "none":
            choice = {"type": "tool", "name": request.output_name}
    elif not request.tools:
        has_calls = any(message.tool_calls for message in request.messages)
        return {"type": "none"} if has_calls and not request.options.get("tools") else None
    match request.tool_choice:
        case "auto" | "none" | None:
            if choice is None and request.tool_choice is not None:
                choice = {"type": request.tool_choice}
        case "required":
            choice = {"type": "any"}
        case name:
            choice = {"type": "tool", "name": name}
    if request.options.get("parallel_tool_calls") is False and (choice is None or choice["type"] != "none"):
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    return choice


# ---- thinking, length and form of the answer


def _build_thinking(
    request: ProviderRequest, model: Model, provider_name: str, messages: list[Json]
) -> tuple[Json | None, str | None]:
    """How the model thinks, and the effort that it is told."""
    reasoning = request.reasoning
    if reasoning is None:
        return None, None
    _refuse_twice(request, provider_name)
    if reasoning.effort == "none":
        return {"type": "disabled"}, None
    if reasoning.budget_tokens is None and model.thinks_adaptively:
        thinking: Json = {"type": "adaptive"}
        if model.hides_thinking:
            thinking["display"] = "summarized"
        return thinking, _effort(reasoning, model)
    if not model.takes_budget:
        text = f"{request.model} takes an effort for reasoning, not budget_tokens: use reasoning=Reasoning(effort=...)"
        raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))
    if _is_in_anothers_round(messages):
        return None, None
    budget = reasoning.budget_tokens or _BUDGET_BY_EFFORT[reasoning.effort or "medium"]
    if reasoning.budget_tokens is None:
        limit = request.options.get("max_tokens")
        limit = limit if isinstance(limit, int) else model.output_limit
        budget = max(1024, min(budget, limit - _ANSWER_TOKENS_MIN))
    return {"type": "enabled", "budget_tokens": budget}, None


def _effort(reasoning: Reasoning, model: Model) -> str | None:
    match reasoning.effort:
        case "minimal":
            return "low"
        case "xhigh" if not model.takes_xhigh:
            return "max"
        case effort:
            return effort


def _refuse_twice(request: ProviderRequest, provider_name: str) -> None:
    where = f"provider_options[{provider_name!r}]"
    effort = (request.options.get("output_config") or {}).get("effort")
    if request.options.get("thinking") is not None or effort is not None:
        name = "thinking" if effort is None else "output_config"
        text = f"reasoning is set twice: by the agent's `reasoning` and by {where}[{name!r}]; remove one of them"
        raise ProviderError(ErrorInfo(kind=ErrorKind.BAD_REQUEST, message=text))


def _is_in_anothers_round(messages: list[Json]) -> bool:
    """Whether the round of calls that goes on was begun without thinking, maybe by another provider: a model that thinks
    with a budget refuses to begin with it in the middle."""
    if len(messages) < 2 or messages[-1]["content"][0]["type"] != "tool_result":
        return False
    return messages[-2]["content"][0]["type"] not in ("thinking", "redacted_thinking")


def _max_tokens(model: Model, thinking: Json | None) -> int:
    """The API wants a limit. What is thought counts, so a budget comes on top."""
    budget = (thinking or {}).get("budget_tokens")
    return (
        model.max_tokens if budget is None else max(model.max_tokens, min(budget + _ANSWER_TOKENS, model.output_limit))
    )


def _build_output_config(request: ProviderRequest, effort: str | None) -> Json | None:
    config: Json = {"effort": effort} if effort else {}
    if request.output_schema is not None and output_way(request) is OutputWay.ENFORCED:
        config["format"] = {"type": "json_schema", "schema": closed_schema(request.output_schema)}
    config.update(request.options.get("output_config") or {})
    return without_none(config) or None


def _container(messages: list[Message], provider_name: str) -> str | None:
    """Where the provider runs code for the calls that are being answered."""
    answer = next((message for message in reversed(messages) if message.role == "assistant"), None)
    if answer is None or messages[-1].role == "user":
        return None
    own = [part.data for part in answer.reasoning if part.provider == provider_name and CONTAINER in part.data]
    return str(own[-1][CONTAINER]) if own else None
