"""What is known of models, and what is not asked of those that are known to lack it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnmill.protocol.content import FilePart, ImagePart, Message, TextPart, ToolResult, ToolResultPart
from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import ModelCapabilities, load_settings
from turnmill.protocol.specs import Reasoning, ToolSpec
from turnmill.workers.providers.base import ProviderError, ProviderRequest
from turnmill.workers.providers.capabilities import Capabilities, KnownModels

IMAGE = ImagePart(data=b"\x89PNG", media_type="image/png")
FILE = FilePart(data=b"%PDF", media_type="application/pdf")
SCREENSHOT = ToolResultPart(ToolResult(tool_call_id="1", tool_name="look", content=[IMAGE]))
BLIND, SEEING = "local:blind", "local:seeing"


def request(*parts: Any, **fields: Any) -> ProviderRequest:
    return ProviderRequest(model="", messages=[Message(role="user", content=[TextPart("Hi"), *parts])], **fields)


def told(**capabilities: Any) -> KnownModels:
    return KnownModels({BLIND: ModelCapabilities(**capabilities)}, {})


# ---- what is known


def test_a_window_comes_from_the_package_where_it_knows_the_model_at_its_endpoint() -> None:
    known = KnownModels({}, {"openai": "https://api.openai.com/v1", "local": "http://127.0.0.1:8000/v1"})
    window = known.of("openai:gpt-5-mini").context_window
    assert window is not None
    assert window > 100_000
    assert known.of("openai:gpt-5-mini").images is None
    assert known.of("openai:no-such-model") == Capabilities()
    assert known.of("local:gpt-5-mini") == Capabilities()
    assert known.of("elsewhere:gpt-5-mini") == Capabilities()


def test_the_settings_have_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = '[models."openai:gpt-5-mini"]\ncontext_window = 5000\nimages = true\nreasoning = false\n'
    (tmp_path / "turnmill.toml").write_text(table)
    known = KnownModels.from_settings(load_settings(), {})
    assert known.of("openai:gpt-5-mini") == Capabilities(context_window=5000, images=True, reasoning=False)
    assert known.of_provider("openai") == {"openai:gpt-5-mini": known.of("openai:gpt-5-mini")}
    assert known.of_provider("local") == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("image = false", r"turnmill.toml: models.local:blind.image: .*the nearest that exists is images"),
        ("context_window = 0", r"models.local:blind.context_window: 0 is not allowed"),
    ],
)
def test_a_wrong_table_is_refused(line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "turnmill.toml").write_text(f'[models."{BLIND}"]\n{line}\n')
    with pytest.raises(ConfigurationError, match=words):
        load_settings()


# ---- what is not asked


@pytest.mark.parametrize(
    ("lacking", "asked"),
    [
        ("images", request(IMAGE)),
        ("images", request(SCREENSHOT)),
        ("files", request(FILE)),
        ("tools", request(tools=[ToolSpec(name="look")])),
        ("reasoning", request(reasoning=Reasoning(effort="low"))),
    ],
)
def test_what_a_model_lacks_is_refused_with_the_setting_that_says_so(lacking: str, asked: ProviderRequest) -> None:
    with pytest.raises(ProviderError) as caught:
        told(**{lacking: False}).that_take([BLIND], asked)
    info = caught.value.info
    assert (info.kind, info.retryable) == ("bad_request", False)
    assert f"the model 'local:blind' takes no {lacking}" in info.message
    assert f'`[models."local:blind"] {lacking} = false`' in info.message
    for known in (told(**{lacking: True}), told()):
        assert known.that_take([BLIND], asked) == [BLIND]


def test_what_is_not_asked_for_is_no_reason() -> None:
    known = told(images=False, files=False, tools=False, reasoning=False)
    assert known.that_take([BLIND], request(reasoning=Reasoning(effort="none"))) == [BLIND]


def test_a_fallback_that_can_is_asked_in_place_of_one_that_cannot() -> None:
    known = told(images=False)
    assert known.that_take([BLIND, SEEING], request(IMAGE)) == [SEEING]
    assert known.that_take([BLIND, SEEING], request()) == [BLIND, SEEING]
