"""What a model call cost, from its usage.

In this order: what the provider says itself, a table `[prices."<provider:model>"]` of turnmill.toml, and the price list
of the package genai-prices (the extra `prices`), whose data comes with it: nothing is fetched. A model counts as listed
only at the endpoint that the list knows, so that a server of one's own is not priced as if it were OpenAI. What is not
known is absent, never 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from decimal import Decimal
from types import ModuleType
from typing import Any

from turnmill.protocol.content import Cost, Usage
from turnmill.protocol.logs import get_logger
from turnmill.protocol.settings import ModelPrice, Settings

from .providers.registry import base_urls

_log = get_logger(__name__)
_MILLION = Decimal(1_000_000)


class Prices:
    """Prices of this process's models."""

    def __init__(self, table: Mapping[str, ModelPrice], endpoints: Mapping[str, str]) -> None:
        """`endpoints` are base URLs by the prefix of their models' names."""
        self._table = table
        self._endpoints = endpoints
        self._unknown: set[str] = set()
        self._list: ModuleType | None = None

    @classmethod
    def from_settings(cls, settings: Settings, environment: Mapping[str, str] = os.environ) -> Prices:
        return cls(settings.prices, base_urls(settings, environment))

    def load_for(self, prefixes: list[str]) -> None:
        """Import the price list now, where one of these providers may need it: that takes a third of a second."""
        if any(prefix in self._endpoints for prefix in prefixes):
            self._price_list()

    def cost_of(self, model: str | None, usage: Usage | None) -> Cost | None:
        """The cost of one call of `provider:model`; None where its price or its usage is not known."""
        if usage is None or model is None or model in self._unknown:
            return None
        price = self._table.get(model)
        if price is not None:
            return _cost_by_table(price, usage)
        return self._listed_cost(model, usage)

    def _listed_cost(self, model: str, usage: Usage) -> Cost | None:
        prefix, _, name = model.partition(":")
        url = self._endpoints.get(prefix)
        prices = self._price_list() if url is not None else None
        if prices is None:
            self._unknown.add(model)
            return None
        try:
            priced = prices.calc_price(_listed_usage(prices, usage), name, provider_api_url=url)
        except LookupError:
            self._unknown.add(model)
            return None
        except Exception as error:  # an answer is not lost because its price is not found
            _log.warning("a price cannot be applied", model=model, error=str(error))
            return None
        if priced.model_price.input_mtok is None or priced.model_price.output_mtok is None:
            return None  # what the list leaves out, it counts as free
        return Cost(
            input=priced.input_price, output=priced.output_price, total=priced.total_price, source="genai-prices"
        )

    def _price_list(self) -> Any:
        if self._list is None:
            try:
                import genai_prices
            except ImportError:
                self._endpoints = {}  # the extra is not installed: nobody is listed
                return None
            self._list = genai_prices
        return self._list


def _cost_by_table(price: ModelPrice, usage: Usage) -> Cost:
    cached, written = _cached_and_written(usage)
    per_cached = price.input if price.cached is None else price.cached
    per_written = price.input if price.cache_write is None else price.cache_write
    others = usage.input_tokens - cached - written
    input_cost = (others * price.input + cached * per_cached + written * per_written) / _MILLION
    output_cost = usage.output_tokens * price.output / _MILLION
    return Cost(
        currency=price.currency,
        input=input_cost,
        output=output_cost,
        total=input_cost + output_cost,
        source="settings",
    )


def _listed_usage(prices: Any, usage: Usage) -> Any:
    cached, written = _cached_and_written(usage)
    return prices.Usage(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=cached,
        cache_write_tokens=written,
    )


def _cached_and_written(usage: Usage) -> tuple[int, int]:
    """Tokens read from and written to a cache: parts of the input, whatever a provider says."""
    cached = min(usage.cached_tokens, usage.input_tokens)
    return cached, min(usage.cache_write_tokens, usage.input_tokens - cached)
