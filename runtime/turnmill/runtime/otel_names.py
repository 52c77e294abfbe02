"""The names that OpenTelemetry's conventions for generative AI give to spans, attributes and metrics.

Written out here: the conventions are still in development, and their packages move the constants about.
"""

from __future__ import annotations

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_write.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
CONVERSATION = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
TOOL = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL = "gen_ai.tool.call.id"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
ERROR_TYPE = "error.type"
SESSION = "session.id"

TURN = "turnmill.turn.id"
PARENT_TURN = "turnmill.parent_turn.id"
STEP = "turnmill.step"
ATTEMPT = "turnmill.attempt"
STATUS = "turnmill.status"
OUTCOME = "turnmill.outcome"
TERMINATION = "turnmill.termination"
STEPS = "turnmill.steps"
HOOK = "turnmill.hook.name"
HOOK_POINT = "turnmill.hook.point"
COST = "turnmill.cost"
CURRENCY = "turnmill.currency"
METADATA = "turnmill.metadata"

CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
CONTENT_ON_SPANS = frozenset({"SPAN_ONLY", "SPAN_AND_EVENT", "TRUE"})

SECONDS_BUCKETS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
LONG_SECONDS_BUCKETS = [0.1 * 2**power for power in range(13)]
TOKENS_BUCKETS = [float(4**power) for power in range(14)]
