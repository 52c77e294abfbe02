"""One conversation in the shape of each format: parts, calls and their answers, what goes back to its own provider only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from turnmill.protocol.content import (
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from turnmill.protocol.specs import Reasoning, ToolSpec
from turnmill.workers.providers import (
    bedrock_converse_request,
    gemini_request,
    ollama_chat_request,
    openai_responses_request,
)
from turnmill.workers.providers.base import ProviderError, ProviderRequest

Build = Callable[[ProviderRequest, str], dict[str, Any]]
BUILDERS: dict[str, Build] = {
    "openai-responses": openai_responses_request.build_body,
    "gemini": gemini_request.build_body,
    "bedrock-converse": bedrock_converse_request.build_body,
    "ollama-chat": ollama_chat_request.build_body,
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = ToolSpec(name="weather", description="The weather.", schema=SCHEMA)
PICTURE = ImagePart(data=b"img", media_type="image/png")
CALLS = [
    ToolCallPart(ToolCall(id="c1", name="weather", arguments={"city": "Oslo"})),
    ToolCallPart(ToolCall(id="c2", name="weather", arguments={}, error="no JSON")),
]
RESULTS = [
    ToolResultPart(ToolResult(tool_call_id="c1", tool_name="weather", result={"degrees": 4})),
    ToolResultPart(ToolResult(tool_call_id="c2", tool_name="weather", result="Error: no JSON", is_error=True)),
]
TALK = [
    Message(role="user", content="Weather?"),
    Message(role="assistant", content=[TextPart("I look."), *CALLS]),
    Message(role="tool", content=RESULTS),
    Message(role="user", content="And now?"),
]


def body(api: str, messages: list[Message] = TALK, **fields: Any) -> dict[str, Any]:
    return BUILDERS[api](ProviderRequest(model="m", messages=messages, **fields), "mine")


# ---- calls and their answers


def test_responses_are_items() -> None:
    assert body("openai-responses", system="Be brief.", tools=[WEATHER], tool_choice="weather") == {
        "model": "m",
        "stream": True,
        "store": False,
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Weather?"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": '{"degrees":4}'},
            {"type": "function_call_output", "call_id": "c2", "output": "Error: no JSON"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [
            {
                "type": "function",
                "name": "weather",
                "description": "The weather.",
                "parameters": SCHEMA,
                "strict": False,
            }
        ],
        "tool_choice": {"type": "function", "name": "weather"},
    }


def test_gemini_has_turns_of_user_and_model() -> None:
    assert body("gemini", system="Be brief.", tools=[WEATHER], tool_choice="weather") == {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Weather?"}]},
            {
                "role": "model",
                "parts": [
                    {"text": "I look."},
                    {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Oslo"}}},
                    {"functionCall": {"id": "c2", "name": "weather", "args": {}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "c1", "name": "weather", "response": {"degrees": 4}}},
                    {"functionResponse": {"id": "c2", "name": "weather", "response": {"error": "Error: no JSON"}}},
                    {"text": "And now?"},
                ],
            },
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "weather", "description": "The weather.", "parametersJsonSchema": SCHEMA}
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["weather"]}},
    }


def test_bedrock_has_blocks() -> None:
    assert body("bedrock-converse", system="Be brief.", tools=[WEATHER], tool_choice="weather") == {
        "system": [{"text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"text": "I look."},
                    {"toolUse": {"toolUseId": "c1", "name": "weather", "input": {"city": "Oslo"}}},
                    {"toolUse": {"toolUseId": "c2", "name": "weather", "input": {}}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"toolResult": {"toolUseId": "c1", "content": [{"json": {"degrees": 4}}], "status": "success"}},
                    {"toolResult": {"toolUseId": "c2", "content": [{"text": "Error: no JSON"}], "status": "error"}},
                    {"text": "And now?"},
                ],
            },
        ],
        "toolConfig": {
            "tools": [
                {"toolSpec": {"name": "weather", "description": "The weather.", "inputSchema": {"json": SCHEMA}}}
            ],
            "toolChoice": {"tool": {"name": "weather"}},
        },
    }


def test_ollama_has_arguments_as_objects() -> None:
    function = {"name": "weather", "description": "The weather.", "parameters": SCHEMA}
    assert body("ollama-chat", system="Be brief.", tools=[WEATHER], tool_choice="required") == {
        "model": "m",
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {"id": "c1", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
                    {"id": "c2", "function": {"name": "weather", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_name": "weather", "tool_call_id": "c1", "content": '{"degrees":4}'},
            {"role": "tool", "tool_name": "weather", "tool_call_id": "c2", "content": "Error: no JSON"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", "function": function}],
    }


# ---- what goes back to its own provider only


def test_reasoning_items_go_back_before_their_calls() -> None:
    """LC-11, AC-09: as they came but for the status, which an input has not; those of others do not."""
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA=", "status": "completed"}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}}
    own = [ReasoningPart(text="hm", provider="mine", data={"item": each}) for each in (item, search)]
    foreign = ReasoningPart(text="no", provider="other", data={"item": {"type": "reasoning", "id": "rs_9"}})
    asked = [Message(role="user", content="?"), Message(role="assistant", content=[*own, foreign, CALLS[0]])]
    sent = body("openai-responses", asked)["input"]
    assert sent[1] == {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA="}
    assert sent[2] == search
    assert [each["type"] for each in sent[1:]] == ["reasoning", "web_search_call", "function_call"]


def test_signatures_go_back_on_their_parts() -> None:
    """LC-11: on the call, on the thought, on the text before, or, at the end, on an empty text."""
    call = ToolCall(id="c1", name="weather", arguments={}, metadata={"mine": {"thoughtSignature": "of the call"}})
    parts = [
        ReasoningPart(text="I think", provider="mine", data={"thoughtSignature": "of the thought"}),
        ReasoningPart(text="unsigned", provider="mine"),
        TextPart("said"),
        ReasoningPart(provider="mine", data={"thoughtSignature": "of the text"}),
        ReasoningPart(provider="other", data={"thoughtSignature": "of another"}),
        ReasoningPart(provider="mine", data={"item": {"executableCode": {"code": "1"}}}),
        ToolCallPart(call),
        ReasoningPart(provider="mine", data={"thoughtSignature": "at the end"}),
    ]
    sent = body("gemini", [Message(role="assistant", content=parts)])["contents"][0]["parts"]
    assert sent == [
        {"text": "I think", "thought": True, "thoughtSignature": "of the thought"},
        {"text": "said", "thoughtSignature": "of the text"},
        {"executableCode": {"code": "1"}},
        {"thoughtSignature": "of the call", "functionCall": {"id": "c1", "name": "weather", "args": {}}},
        {"text": "", "thoughtSignature": "at the end"},
    ]
    foreign = BUILDERS["gemini"](
        ProviderRequest(model="m", messages=[Message(role="assistant", content=parts)]), "third"
    )
    assert foreign["contents"][0]["parts"] == [
        {"text": "said"},
        {"functionCall": {"id": "c1", "name": "weather", "args": {}}},
    ]


def test_bedrock_takes_back_what_is_signed_or_hidden() -> None:
    """AC-09."""
    parts = [
        ReasoningPart(text="hm", provider="mine", data={"signature": "sig"}),
        ReasoningPart(text="", provider="mine", data={"redactedContent": "AAEC"}),
        ReasoningPart(text="unsigned", provider="mine"),
        TextPart("  "),
        TextPart("said"),
    ]
    sent = body("bedrock-converse", [Message(role="assistant", content=parts)])["messages"][0]["content"]
    assert sent == [
        {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "sig"}}},
        {"reasoningContent": {"redactedContent": "AAEC"}},
        {"text": "said"},
    ]


# ---- parts


def test_images_and_files() -> None:
    pdf = FilePart(data=b"%PDF", media_type="application/pdf", filename="a_b.c.pdf")
    asked = [Message(role="user", content=[TextPart("Look"), PICTURE, pdf])]
    assert body("openai-responses", asked)["input"][0]["content"][1:] == [
        {"type": "input_image", "image_url": "data:image/png;base64,aW1n"},
        {"type": "input_file", "filename": "a_b.c.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
    ]
    assert body("gemini", asked)["contents"][0]["parts"][1:] == [
        {"inlineData": {"mimeType": "image/png", "data": "aW1n"}},
        {"inlineData": {"mimeType": "application/pdf", "data": "JVBERg=="}},
    ]
    assert body("bedrock-converse", asked)["messages"][0]["content"][1:] == [
        {"image": {"format": "png", "source": {"bytes": "aW1n"}}},
        {"document": {"format": "pdf", "name": "a-b-c-pdf", "source": {"bytes": "JVBERg=="}}},
    ]
    only_image = [Message(role="user", content=[TextPart("Look"), PICTURE])]
    assert body("ollama-chat", only_image)["messages"] == [{"role": "user", "content": "Look", "images": ["aW1n"]}]


def test_a_tools_picture_is_part_of_its_answer() -> None:
    result = ToolResult(tool_call_id="c1", tool_name="weather", result=None, content=[TextPart("here"), PICTURE])
    asked = [
        *TALK[:1],
        Message(role="assistant", content=[CALLS[0]]),
        Message(role="tool", content=[ToolResultPart(result)]),
    ]
    assert body("openai-responses", asked)["input"][-1]["output"] == [
        {"type": "input_text", "text": "here"},
        {"type": "input_image", "image_url": "data:image/png;base64,aW1n"},
    ]
    assert body("gemini", asked)["contents"][-1]["parts"] == [
        {"functionResponse": {"id": "c1", "name": "weather", "response": {"result": "here"}}},
        {"inlineData": {"mimeType": "image/png", "data": "aW1n"}},
    ]
    told = body("bedrock-converse", asked)["messages"][-1]["content"][0]["toolResult"]["content"]
    assert told == [{"text": "here"}, {"image": {"format": "png", "source": {"bytes": "aW1n"}}}]
    assert body("ollama-chat", asked)["messages"][-1]["images"] == ["aW1n"]


@pytest.mark.parametrize(
    ("api", "part", "reason"),
    [
        ("openai-responses", FilePart(data=b"1", media_type="audio/wav"), "takes no audio"),
        ("bedrock-converse", ImagePart(url="https://a.example/b.png"), "fetches no URLs"),
        ("bedrock-converse", FilePart(data=b"1", media_type="application/zip"), "takes no files of application/zip"),
        ("ollama-chat", ImagePart(url="https://a.example/b.png"), "fetches no images"),
        ("ollama-chat", FilePart(data=b"1", media_type="application/pdf"), "takes texts and images"),
    ],
)
def test_what_a_format_cannot_carry_is_refused_in_words(api: str, part: Any, reason: str) -> None:
    with pytest.raises(ProviderError, match=reason) as refused:
        body(api, [Message(role="user", content=[part])])
    assert (refused.value.info.kind, refused.value.info.retryable) == ("bad_request", False)


@pytest.mark.parametrize("api", BUILDERS)
def test_what_was_not_loaded_is_never_sent(api: str) -> None:
    with pytest.raises(ProviderError, match="was not loaded"):
        body(api, [Message(role="user", content=[ImagePart()])])


# ---- options


def test_a_schema_for_the_answer() -> None:
    wanted = {"output_schema": {"type": "object"}, "output_name": "City"}
    assert body("openai-responses", **wanted)["text"] == {
        "format": {"type": "json_schema", "strict": False, "name": "City", "schema": {"type": "object"}}
    }
    assert body("gemini", **wanted)["generationConfig"] == {
        "responseMimeType": "application/json",
        "responseJsonSchema": {"type": "object"},
    }
    assert body("ollama-chat", **wanted)["format"] == {"type": "object"}
    tools = body("bedrock-converse", **wanted)["toolConfig"]
    assert tools["toolChoice"] == {"tool": {"name": "City"}}
    assert tools["tools"][0]["toolSpec"]["inputSchema"] == {"json": {"type": "object"}}
    both = body("bedrock-converse", tools=[WEATHER], **wanted)["toolConfig"]
    assert both["toolChoice"] == {"any": {}} and len(both["tools"]) == 2


@pytest.mark.parametrize(
    ("model", "reasoning", "expected"),
    [
        ("gemini-3-pro", Reasoning(effort="low"), {"thinkingLevel": "low", "includeThoughts": True}),
        ("gemini-2.5-flash", Reasoning(effort="low"), {"thinkingBudget": 1024, "includeThoughts": True}),
        ("gemini-3-pro", Reasoning(budget_tokens=5), {"thinkingBudget": 5, "includeThoughts": True}),
        ("gemini-3-pro", Reasoning(effort="none"), {"thinkingBudget": 0, "includeThoughts": False}),
    ],
)
def test_how_much_gemini_thinks(model: str, reasoning: Reasoning, expected: dict[str, Any]) -> None:
    request = ProviderRequest(model=model, messages=TALK, reasoning=reasoning)
    assert gemini_request.build_body(request, "mine")["generationConfig"]["thinkingConfig"] == expected


def test_how_much_others_think() -> None:
    low = Reasoning(effort="low")
    responses = body("openai-responses", reasoning=low)
    assert responses["reasoning"] == {"effort": "low"} and responses["include"] == ["reasoning.encrypted_content"]
    assert "include" not in body("openai-responses"), "models that do not think refuse it"
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert body("bedrock-converse", reasoning=low)["additionalModelRequestFields"] == thinking
    assert body("ollama-chat", reasoning=low)["think"] == "low"
    assert body("ollama-chat", reasoning=Reasoning(effort="none"))["think"] is False
    for api in ("openai-responses", "ollama-chat"):
        with pytest.raises(ProviderError, match="budget_tokens"):
            body(api, reasoning=Reasoning(budget_tokens=9))


def test_options_come_last_and_find_their_place() -> None:
    assert body("openai-responses", options={"store": True, "temperature": 0.5, "stream": False})["store"] is True
    gemini = body("gemini", options={"temperature": 0.5, "safetySettings": [1], "stream": False, "topK": None})
    assert gemini["generationConfig"] == {"temperature": 0.5} and gemini["safetySettings"] == [1]
    assert "stream" not in gemini
    options = {"max_tokens": 9, "guardrailConfig": {"a": 1}, "top_k": 3, "stream": False}
    bedrock = body("bedrock-converse", options=options)
    assert bedrock["inferenceConfig"] == {"maxTokens": 9} and bedrock["guardrailConfig"] == {"a": 1}
    assert bedrock["additionalModelRequestFields"] == {"top_k": 3}
    ollama = body("ollama-chat", options={"num_ctx": 4096, "keep_alive": "5m", "stream": False})
    assert (ollama["options"], ollama["keep_alive"], ollama["stream"]) == ({"num_ctx": 4096}, "5m", False)


def test_a_prefix_stays_the_same_while_a_conversation_grows() -> None:
    """Caches of prompts live from that: nothing that changes is put in front."""
    for api, build in BUILDERS.items():
        key = {"openai-responses": "input", "gemini": "contents"}.get(api, "messages")
        request = ProviderRequest(model="m", messages=TALK[:1], system="s", tools=[WEATHER])
        first = build(request, "mine")
        later = build(msgspec.structs.replace(request, messages=TALK, step_number=9, attempt=3, turn_id="t"), "mine")
        assert later[key][: len(first[key])] == first[key]
        assert {name: value for name, value in first.items() if name != key} == {
            name: value for name, value in later.items() if name != key
        }


# ---- from one provider to another


def test_ids_of_another_providers_calls_are_made_fit_and_stay_together() -> None:
    odd = "functions.weather:0" + "x" * 60
    talk = [
        Message(role="assistant", content=[ToolCallPart(ToolCall(id=odd, name="weather", arguments={}))]),
        Message(role="tool", content=[ToolResultPart(ToolResult(tool_call_id=odd, tool_name="weather", result="4"))]),
    ]
    call, result = body("openai-responses", talk)["input"]
    assert call["call_id"] == result["call_id"] != odd and len(call["call_id"]) == 64
    asked, answered = (message["content"][0] for message in body("bedrock-converse", talk)["messages"])
    assert asked["toolUse"]["toolUseId"] == answered["toolResult"]["toolUseId"] == call["call_id"]


def test_bedrock_marks_what_stays_for_the_models_that_keep_it() -> None:
    def marked(model: str, **options: Any) -> list[str]:
        request = ProviderRequest(model=model, messages=TALK, system="Be brief.", options=options)
        sent = bedrock_converse_request.build_body(request, "mine")
        places = ["system"] if "cachePoint" in sent["system"][-1] else []
        return places + [str(n) for n, each in enumerate(sent["messages"]) if "cachePoint" in each["content"][-1]]

    assert marked("eu.anthropic.claude-sonnet-4-5-20250929-v1:0") == ["system", "0", "2"]
    assert marked("eu.anthropic.claude-sonnet-4-5-20250929-v1:0", cache_control=None) == []
    assert marked("amazon.titan-text") == []
