"""What may be set from outside, with its default, its unit and its bounds.

A value comes from an argument, else from `TURNMILL_<NAME>`, else from `turnmill.toml` in the working directory, else
from the default below. An empty variable counts as not set. A name that nobody knows is an error that offers the
nearest one, because a misspelt setting would otherwise be a default that surprises somebody at night.

Settings that contradict each other are refused here, before a process joins the namespace; `load_settings` turns
everything that can be wrong into one readable line.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from turnmill.protocol.errors import ConfigurationError

PREFIX = "TURNMILL_"
FILE_NAME = "turnmill.toml"
KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
HOUR_SECONDS = 3600
DAY_SECONDS = 24 * HOUR_SECONDS
LEAVING_SECONDS = 3.0
"""What a process needs behind its drain to hand back what is left, and to end."""

# Platforms hand these two out under their own names.
FALLBACK_VARIABLES: Mapping[str, str] = {"redis_url": "REDIS_URL", "port": "PORT"}

# Variables with our prefix that are no settings: the options of the command line, the example's model, and where the
# embedded server is.
OTHER_VARIABLES = frozenset(
    PREFIX + name
    for name in (
        "AFTER",
        "AGENT",
        "ALL",
        "API",
        "APP",
        "CHECK",
        "CONCURRENCY",
        "CONTENT_TYPE",
        "DEMO_MODEL",
        "DETACH",
        "EVENTS",
        "FROM",
        "HOOKS",
        "IDEMPOTENCY_KEY",
        "INTERVAL",
        "INTO",
        "JSON",
        "LIMIT",
        "MAX_STEPS",
        "MESSAGE",
        "MESSAGES",
        "MODE",
        "MODEL",
        "NO_STREAM",
        "ONCE",
        "ON_BUSY",
        "OPTION",
        "PASSWORD_ENV",
        "POOL",
        "PUBLISH",
        "QUEUE",
        "RAW",
        "REASON",
        "RELOAD",
        "RESULT",
        "ROLE",
        "SESSION",
        "SPLIT",
        "STATE",
        "STATUS",
        "STEP",
        "SUB_TURNS",
        "TIMELINE",
        "TIMEOUT",
        "TURN",
        "USER",
        "VALKEY_SERVER",
        "WAIT",
        "WATCH",
    )
)

# Kubernetes describes a service called `turnmill...` to every pod with such variables; nobody set them on purpose.
_SERVICE_LINK = re.compile(
    PREFIX + r"(?:.+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_.+)?)\Z"
)
_URL_PASSWORD = re.compile(r"(?<=://)([^:/?@]*):.*@")
_QUERY_PASSWORD = re.compile(r"([?&]password=)[^&]*")
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
_SECRET_FIELDS = frozenset({"redis_url", "api_tokens", "providers"})
_MASK = "***"
TABLES = frozenset({"providers", "prices", "models", "limits"})
"""What only the file can say."""


def _redis_url(value: object) -> object:
    """`embedded` is a word for None, so that a variable or an option can undo a URL from further down."""
    if value is None or value == "embedded":
        return None
    if isinstance(value, str) and value.startswith(_REDIS_SCHEMES):
        return value
    raise ValueError("a URL that starts with redis://, rediss:// or unix://, or the word `embedded`, is needed")


def _comma_separated(value: object) -> object:
    if isinstance(value, str):
        return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
    return value


def _none_by_name(value: object) -> object:
    return None if value == "none" else value


def _lower_case(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _telemetry(value: object) -> object:
    if isinstance(value, str) and (value in ("none", "otel") or _FUNCTION.match(value)):
        return value
    raise ValueError("it must be none, otel, or a function as module:function")


Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WholeSeconds: TypeAlias = Annotated[int, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(gt=0)]
Bytes: TypeAlias = Annotated[int, Field(gt=0)]
VariableName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]


class ProviderEndpoint(BaseModel):
    """A further endpoint of models: a table `[providers.<name>]` of `turnmill.toml`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api: Annotated[str, Field(min_length=1, description="which adapter speaks to it, such as `openai`")]
    base_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    api_key_env: Annotated[VariableName | None, Field(description="the name of a variable, never a key")] = None


class ProviderLimits(BaseModel):
    """What all LLM workers together may ask of a provider: a table `[limits.<name>]` of `turnmill.toml`, by the prefix of
    its models. Without a number there is no such limit; the circuit breaker is always there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: Annotated[int, Field(ge=1, le=100_000, description="calls at a time")] | None = None
    requests_per_minute: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=10_000_000_000, description="of prompts and answers")] | None = (
        None
    )
    breaker_failures: Annotated[
        int, Field(ge=1, le=1000, description="failures in a row after which nobody calls it for a while")
    ] = 5


Price: TypeAlias = Annotated[Decimal, Field(ge=0, le=10**9, allow_inf_nan=False)]


class ModelPrice(BaseModel):
    """What a model costs: a table `[prices."<provider:model>"]` of `turnmill.toml`, in units of `currency` per million
    tokens. Input tokens read from a cache cost `cached`, those written to one `cache_write`; without, `input`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input: Price
    output: Price
    cached: Price | None = None
    cache_write: Price | None = None
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$", description="as ISO 4217 has it")] = "USD"


class ModelCapabilities(BaseModel):
    """What a model can do: a table `[models."<provider:model>"]` of `turnmill.toml`. What is not said is not known, and
    left to the provider to refuse."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    context_window: Annotated[int, Field(ge=1, le=10**9, description="tokens of a prompt with its answer")] | None = (
        None
    )
    images: bool | None = None
    files: bool | None = None
    tools: bool | None = None
    reasoning: bool | None = None


_TABLE_MODELS: dict[str, type[BaseModel]] = {
    "prices": ModelPrice,
    "models": ModelCapabilities,
    "providers": ProviderEndpoint,
    "limits": ProviderLimits,
}


class Settings(BaseSettings):
    """One process's settings; the same class for every role, so that one file can serve them all."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=PREFIX, hide_input_in_errors=True)

    redis_url: Annotated[str | None, BeforeValidator(_redis_url)] = Field(
        None, description="URL of Redis or Valkey; `embedded` or nothing: a server of our own in `data_dir`"
    )
    data_dir: Path = Field(Path(".turnmill"), description="directory of the embedded server")
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = Field(
        "tm", description="prefix of every key; two namespaces share nothing"
    )
    partitions: Annotated[int, Field(ge=1, le=1024)] = Field(
        4, description="parts of the namespace; fixed when the namespace is created"
    )
    wire: Literal["json", "msgpack"] = Field("json", description="how messages are written; both are always read")

    lease_seconds: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        5.0, description="seconds a coordinator owns a partition without renewal"
    )
    liveness_seconds: Seconds = Field(5.0, description="seconds after its last beat that a worker counts as gone")
    heartbeat_seconds: Seconds = Field(1.5, description="seconds between two beats of a worker")
    max_attempts: Count = Field(5, description="how often a call may be lost with its worker before it is given up")
    drain_timeout: Annotated[float, Field(gt=0, lt=HOUR_SECONDS)] = Field(
        25.0, description="seconds that a stopping process may finish what it holds; keep it below the platform's grace"
    )
    stop_grace: Seconds = Field(
        30.0, description="seconds that the platform gives a stopping process before it kills it"
    )
    response_timeout: Seconds = Field(10.0, description="seconds to wait for one answer of the engine")

    acknowledged_replicas: Annotated[int, Field(ge=0)] = Field(
        0, description="replicas that must have a write before it counts (WAIT); 0 does not wait"
    )
    acknowledge_timeout: Seconds = Field(1.0, description="seconds to wait for these replicas")

    event_ttl: WholeSeconds = Field(HOUR_SECONDS, description="seconds a turn's channel is kept after its end")
    record_ttl: WholeSeconds = Field(
        DAY_SECONDS, description="seconds a turn's record and result are kept after its end"
    )
    idempotency_ttl: Annotated[WholeSeconds | None, BeforeValidator(_none_by_name)] = Field(
        None, description="seconds an idempotency key is kept after its first use; as long as records without it"
    )
    session_ttl: Annotated[WholeSeconds | None, BeforeValidator(_none_by_name)] = Field(
        None,
        description="seconds after its last turn that an idle session is removed with everything of it, its turns' "
        "records included; without it, sessions are kept until they are deleted",
    )
    answer_ttl: WholeSeconds = Field(300, description="seconds the answer to a command is kept")
    cancel_ttl: WholeSeconds = Field(DAY_SECONDS, description="seconds the marker of a stopped turn is kept")
    blob_ttl: WholeSeconds = Field(
        HOUR_SECONDS, description="seconds a large value waits for the message that takes it into a session"
    )
    plan_ttl: WholeSeconds = Field(30 * DAY_SECONDS, description="seconds a plan is kept after its last use")
    agent_ttl: WholeSeconds = Field(
        30 * DAY_SECONDS,
        description="seconds a version of an agent is kept after its last use, if it is not the newest",
    )
    dead_letter_ttl: WholeSeconds = Field(7 * DAY_SECONDS, description="seconds a dead letter is kept")
    dead_letter_bytes_max: Bytes = Field(
        64 * MEBIBYTE, description="bytes of memory for dead letters in one partition; the oldest go first"
    )
    feed_ttl: WholeSeconds = Field(DAY_SECONDS, description="seconds a lifecycle event is kept for monitors")

    blob_threshold: Bytes = Field(
        64 * KIBIBYTE, description="bytes above which a result, a text or a file travels by reference"
    )
    payload_bytes_max: Annotated[int, Field(gt=0, le=64 * MEBIBYTE)] = Field(
        8 * MEBIBYTE, description="bytes of the largest payload that is accepted; no message may have more than 64 MiB"
    )
    event_bytes_max: Bytes = Field(
        64 * MEBIBYTE, description="bytes of live events that one attempt at a model or tool call may publish"
    )
    session_queue_max: Count = Field(100, description="messages that may wait in one session")
    dispatch_window: Count = Field(512, description="model tasks of one pool and partition that are in its stream")
    pool_depth_max: Count = Field(
        100_000, description="model calls of one pool that may wait; new turns are refused beyond it"
    )
    tenant_turns_max: Annotated[Count | None, BeforeValidator(_none_by_name)] = Field(
        None, description="turns that one tenant may have waiting or running; new ones are refused beyond it"
    )
    feed_length: Count = Field(10_000, description="lifecycle events that a partition keeps for monitors")
    llm_concurrency: Count = Field(256, description="model calls at a time in one LLM worker")
    tool_concurrency: Count = Field(64, description="tool calls at a time in one tool worker")

    log_format: Literal["console", "json"] = Field("console", description="for people, or for machines")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower_case)] = "info"
    telemetry: Annotated[str, BeforeValidator(_telemetry)] = Field(
        "none", description="where events of turns, calls and hooks go: none, otel (OpenTelemetry), or module:function"
    )

    host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="reserved: address of the gateway")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        8321, description="reserved: port of the gateway; 0 takes a free one"
    )
    api_tokens: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_comma_separated)] = Field(
        (), description="reserved: bearer tokens of the gateway, separated by commas"
    )

    script: Path | None = Field(None, description="file with the answers of the `scripted` provider")
    script_log: Path | None = Field(None, description="file to which the `scripted` provider writes what it was asked")
    providers: dict[str, ProviderEndpoint] = Field({}, description="further endpoints; only from the file")
    prices: dict[str, ModelPrice] = Field({}, description="prices by `provider:model`; only from the file")
    models: dict[str, ModelCapabilities] = Field({}, description="what `provider:model` can do; only from the file")
    limits: dict[str, ProviderLimits] = Field({}, description="limits by provider; only from the file")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _EnvironmentSource(settings_cls), _FileSource(settings_cls)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Settings:
        broken = list(_contradictions(self))
        if broken:
            raise ConfigurationError("; ".join(broken))
        return self

    def masked(self) -> dict[str, Any]:
        """Every setting by name, fit to be shown: no password, no token."""
        shown: dict[str, Any] = self.model_dump(mode="json")
        shown["redis_url"] = mask_url(self.redis_url)
        shown["api_tokens"] = [_MASK] * len(self.api_tokens)
        for endpoint in shown["providers"].values():
            endpoint["base_url"] = mask_url(endpoint["base_url"])
        return shown

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.masked().items()


def load_settings(**overrides: Any) -> Settings:
    """The settings of this process. An override of None counts as not given, as an option that was left out.

    Raises `ConfigurationError` with one line that says which value is wrong, where it comes from and what is allowed.
    """
    for name in overrides:
        if name not in Settings.model_fields:
            raise ConfigurationError(f"unknown setting {name!r}{_nearest(name, Settings.model_fields)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigurationError("; ".join(_readable(error, given))) from None


def origins(**overrides: Any) -> dict[str, str]:
    """Where the value of each setting comes from: `option`, the name of a variable, `turnmill.toml`, or `default`."""
    variables, file = _EnvironmentSource(Settings)(), _FileSource(Settings)()
    found = {}
    for name in Settings.model_fields:
        if overrides.get(name) is not None:
            found[name] = "option"
        elif name in variables:
            own = variable_of(name)
            found[name] = own if variables[name] == os.environ.get(own) else FALLBACK_VARIABLES[name]
        else:
            found[name] = FILE_NAME if name in file else "default"
    return found


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + name.upper()


def mask_url(url: str | None) -> str | None:
    """The URL without its password."""
    if url is None:
        return None
    return _QUERY_PASSWORD.sub(rf"\1{_MASK}", _URL_PASSWORD.sub(rf"\1:{_MASK}@", url))


class _Source(PydanticBaseSettingsSource):
    """A source that yields all its values at once; the parent wants a method for single fields as well."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False


class _EnvironmentSource(_Source):
    """`TURNMILL_*`. Values stay text: validation makes numbers and lists of them."""

    def __call__(self) -> dict[str, Any]:
        variables = {name: value for name, value in os.environ.items() if value and not _is_service_link(name, value)}
        known = {variable_of(name): name for name in Settings.model_fields if name not in TABLES}
        for variable in sorted(variables):
            if variable.startswith(PREFIX) and variable not in known and variable not in OTHER_VARIABLES:
                raise ConfigurationError(
                    f"unknown environment variable {variable}{_nearest(variable, [*known, *OTHER_VARIABLES])}"
                )
        fallen_back = {name: variables[other] for name, other in FALLBACK_VARIABLES.items() if other in variables}
        return fallen_back | {name: variables[variable] for variable, name in known.items() if variable in variables}


class _FileSource(_Source):
    """`turnmill.toml` in the working directory: settings, and tables `[providers.<name>]` and `[prices."<model>"]`."""

    def __call__(self) -> dict[str, Any]:
        path = Path(FILE_NAME)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{FILE_NAME} cannot be read: {error}") from error
        for name in values:
            if name not in Settings.model_fields:
                raise ConfigurationError(f"{FILE_NAME}: unknown key {name!r}{_nearest(name, Settings.model_fields)}")
        return values


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.match(name)) or (name.startswith(PREFIX) and name.endswith("_PORT") and "://" in value)


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
    return f"; the nearest that exists is {matches[0]}" if matches else ""


def _contradictions(settings: Settings) -> Iterator[str]:
    """Rules between two settings; each message names the rule, both settings and both values."""
    # A little air, because a third of a decimal number is rarely exact.
    if settings.heartbeat_seconds * 3 > settings.liveness_seconds * (1 + 1e-9):
        yield _broken_rule(settings, "heartbeat_seconds", "at most a third of", "liveness_seconds")
    if settings.heartbeat_seconds > settings.lease_seconds:
        yield _broken_rule(settings, "heartbeat_seconds", "at most", "lease_seconds")
    if settings.drain_timeout + LEAVING_SECONDS > settings.stop_grace:
        yield _broken_rule(settings, "drain_timeout", f"at least {LEAVING_SECONDS:g} seconds below", "stop_grace")
    if settings.acknowledged_replicas and settings.acknowledge_timeout > settings.response_timeout / 2:
        yield _broken_rule(settings, "acknowledge_timeout", "at most half of", "response_timeout")
    if settings.blob_threshold > settings.payload_bytes_max:
        yield _broken_rule(settings, "blob_threshold", "at most", "payload_bytes_max")
    if settings.event_ttl > settings.record_ttl:
        yield _broken_rule(settings, "event_ttl", "at most", "record_ttl")
    if (settings.idempotency_ttl or 0) > settings.record_ttl:
        yield _broken_rule(settings, "idempotency_ttl", "at most", "record_ttl")


def _broken_rule(settings: Settings, lower: str, relation: str, upper: str) -> str:
    return (
        f"{lower} ({getattr(settings, lower)}) must be {relation} {upper} ({getattr(settings, upper)}): "
        f"change {variable_of(lower)} or {variable_of(upper)}"
    )


def _readable(error: ValidationError, given: Mapping[str, Any]) -> Iterator[str]:
    """One phrase for each wrong value. Values that may hold a secret are not repeated."""
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"]]
        if problem["type"] == "extra_forbidden":
            table = _TABLE_MODELS.get(path[0], ProviderEndpoint)
            message = f"unknown key{_nearest(path[-1], table.model_fields)}"
        else:
            message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be", 1)
        shown = "" if path[0] in _SECRET_FIELDS else f" {problem['input']!r} is not allowed:"
        yield f"{_origin(path, given)}:{shown} {message}"


def _origin(path: list[str], given: Mapping[str, Any]) -> str:
    """Where the person who reads this can change the value."""
    name = path[0]
    if name in given:
        return name
    for variable in (variable_of(name), FALLBACK_VARIABLES.get(name, "")):
        if os.environ.get(variable):
            return variable
    return f"{FILE_NAME}: {'.'.join(path)}"
