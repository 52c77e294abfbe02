"""What calls cost: the order of sources, exact arithmetic, and nothing where nothing is known."""

from __future__ import annotations

import builtins
import socket
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from turnmill.protocol.content import Cost, Usage
from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.settings import ModelPrice, load_settings
from turnmill.workers.prices import Prices

USAGE = Usage(input_tokens=1_000, output_tokens=100, cached_tokens=400, total_tokens=1_100)
OPENAI = {"openai": "https://api.openai.com/v1"}


@pytest.fixture(autouse=True)
def nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a price was asked for over the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)


def table(**price: Any) -> Prices:
    return Prices({"host:mine": ModelPrice(**price)}, {})


def test_tokens_from_a_cache_are_priced_apart() -> None:  # LC-14
    cost = table(input="3", output="15", cached="0.3").cost_of("host:mine", USAGE)
    assert cost == Cost(input=Decimal("0.00192"), output=Decimal("0.0015"), total=Decimal("0.00342"), source="settings")


def test_they_cost_as_much_as_others_where_no_price_is_given() -> None:
    cost = table(input="3", output="0", currency="EUR").cost_of("host:mine", USAGE)
    assert cost is not None
    assert (cost.currency, cost.input, cost.output) == ("EUR", Decimal("0.003"), 0)


def test_tokens_written_to_a_cache_too() -> None:
    usage = Usage(input_tokens=1_000, cached_tokens=400, cache_write_tokens=100)
    cost = table(input="3", output="15", cached="0.3", cache_write="3.75").cost_of("host:mine", usage)
    assert cost is not None
    assert cost.input == Decimal("0.001995")
    plain = table(input="3", output="15", cached="0.3").cost_of("host:mine", usage)
    assert plain is not None
    assert plain.input == Decimal("0.00192")
    listed = Prices({}, {"anthropic": "https://api.anthropic.com/v1"}).cost_of("anthropic:claude-sonnet-4-5", usage)
    assert listed is not None
    assert listed.input is not None
    assert listed.input > Decimal("0.00192")


def test_more_cached_tokens_than_input_count_as_all_of_it() -> None:  # LC-14
    usage = Usage(input_tokens=1_000, cached_tokens=1_400, cache_write_tokens=900)
    cost = table(input="3", output="15", cached="0.3").cost_of("host:mine", usage)
    assert cost is not None
    assert cost.input == Decimal("0.0003")
    listed = Prices({}, OPENAI).cost_of("openai:gpt-5-mini", usage)
    assert listed is not None
    assert listed.input is not None
    assert listed.input > 0


def test_arithmetic_is_exact() -> None:  # LC-14
    prices, total = table(input="0.1", output="0.2"), Cost(input=Decimal(0), output=Decimal(0), total=Decimal(0))
    for _ in range(1_000):
        cost = prices.cost_of("host:mine", Usage(input_tokens=1, output_tokens=1))
        assert cost is not None
        total = total + cost
    assert total.total == Decimal("0.0003")


def test_huge_counts_and_none_at_all_are_exact() -> None:  # LC-14
    prices = table(input="0.0375", output="0.15")
    huge = prices.cost_of("host:mine", Usage(input_tokens=10**15 + 1, output_tokens=10**15 + 3))
    assert huge is not None
    assert (huge.input, huge.output) == (Decimal("37500000.0000000375"), Decimal("150000000.00000045"))
    assert huge.total == Decimal("187500000.0000004875")
    nothing = prices.cost_of("host:mine", Usage())
    assert nothing == Cost(input=Decimal(0), output=Decimal(0), total=Decimal(0), source="settings")


@pytest.mark.parametrize(
    ("model", "base_url"),
    [
        ("openai:gpt-5-mini-2025-08-07", "https://api.openai.com/v1"),
        ("router:anthropic/claude-sonnet-4.5", "https://openrouter.ai/api/v1"),
        ("azure:gpt-4o-2024-08-06", "https://mine.openai.azure.com/openai/v1"),
        ("gemini:gemini-2.5-pro", "https://generativelanguage.googleapis.com/v1beta/openai"),
    ],
)
def test_the_list_knows_names_with_dates_and_makers(model: str, base_url: str) -> None:
    cost = Prices({}, {model.partition(":")[0]: base_url}).cost_of(model, USAGE)
    assert cost is not None
    assert cost.total is not None
    assert cost.total > 0


def test_the_list_knows_models_at_the_endpoint_that_it_knows() -> None:
    cost = Prices({}, OPENAI).cost_of("openai:gpt-5-mini", USAGE)
    assert cost is not None
    assert (cost.currency, cost.source) == ("USD", "genai-prices")
    assert cost.total == (cost.input or 0) + (cost.output or 0)
    assert isinstance(cost.total, Decimal)
    uncached = Prices({}, OPENAI).cost_of("openai:gpt-5-mini", Usage(input_tokens=1_000, output_tokens=100))
    assert uncached is not None
    assert uncached.total is not None
    assert cost.total < uncached.total
    named = Prices({}, {"fast": "https://api.groq.com/openai/v1"})
    assert named.cost_of("fast:llama-3.3-70b-versatile", USAGE) is not None


@pytest.mark.parametrize("model", ["openai:gpt-5-mini", "openai:no-such-model", "host:mine", "scripted:x", "odd"])
def test_what_is_unknown_is_absent(model: str) -> None:  # LC-14
    """A server of one's own under a known name is not priced as that provider."""
    prices = Prices({}, {"openai": "http://127.0.0.1:8000/v1"})
    assert prices.cost_of(model, USAGE) is None
    assert prices.cost_of(model, USAGE) is None
    assert Prices({}, OPENAI).cost_of("openai:no-such-model", USAGE) is None


def test_unknown_usage_costs_nothing_that_could_be_told() -> None:  # LC-14
    assert Prices({}, OPENAI).cost_of("openai:gpt-5-mini", None) is None
    assert Prices({}, OPENAI).cost_of(None, USAGE) is None


def test_without_the_package_only_the_table_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def refuse(name: str, *rest: Any, **named: Any) -> Any:
        if name == "genai_prices":
            raise ImportError(name)
        return importing(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    prices = Prices({"openai:mine": ModelPrice(input=Decimal(1), output=Decimal(1))}, OPENAI)
    prices.load_for(["openai"])
    assert prices.cost_of("openai:gpt-5-mini", USAGE) is None
    assert prices.cost_of("openai:mine", USAGE) is not None


def test_a_list_that_fails_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("overflow")

    monkeypatch.setattr("genai_prices.calc_price", fail)
    assert Prices({}, OPENAI).cost_of("openai:gpt-5-mini", USAGE) is None


def test_turnmill_toml_wins_over_the_list() -> None:
    Path("turnmill.toml").write_text(
        '[prices."openai:gpt-5-mini"]\ninput = 0.1\noutput = 2\n'
        '[providers.local]\napi = "openai"\nbase_url = "http://127.0.0.1:8000/v1"\n'
    )
    prices = Prices.from_settings(load_settings(), {})
    cost = prices.cost_of("openai:gpt-5-mini", USAGE)
    assert cost is not None
    assert (cost.input, cost.source) == (Decimal("0.0001"), "settings")
    assert prices.cost_of("openai:gpt-5", USAGE) is not None
    assert prices.cost_of("local:gpt-5", USAGE) is None
    moved = Prices.from_settings(load_settings(), {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"})
    assert moved.cost_of("openai:gpt-5", USAGE) is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("input = 1", "prices.openai:x.output"),
        ("input = -1\noutput = 1", "prices.openai:x.input"),
        ("input = 1e300\noutput = 1", "prices.openai:x.input"),
        ("input = 1\noutput = 1\ncache = 1", "unknown key; the nearest that exists is cached"),
        ('input = 1\noutput = 1\ncurrency = "dollars"', "prices.openai:x.currency"),
    ],
)
def test_a_price_that_cannot_be_is_refused(lines: str, said: str) -> None:
    Path("turnmill.toml").write_text(f'[prices."openai:x"]\n{lines}\n')
    with pytest.raises(ConfigurationError, match=said):
        load_settings()


def test_prices_are_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNMILL_PRICES", "x")
    with pytest.raises(ConfigurationError, match="unknown environment variable TURNMILL_PRICES"):
        load_settings()
