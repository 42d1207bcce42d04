"""Policies that no model is: silence, random text and random tool calls, by a seed."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.environments.interface import Message, ToolSchema
from streamrl.environments.scripted.text_episode import Policy, PolicyReply
from streamrl.environments.tool_calls.tool_schema import get_tool_name

CALL_RATE = 0.8
"""Share of a random policy's turns with calls, in an environment with tools."""
VALID_RATE = 0.6
"""Share of these turns whose call is meant to match the schema."""
FRAGMENTS = (
    *("", "0", "-1", "3.5", "1e999", "nan", "yes", "A", "the", "\n", "\t", "\\", '"', "'", "%s"),
    *(
        "<|im_end|>",
        "</tool_call>",
        "{",
        "]",
        "()",
        "```",
        "$$",
        "\\boxed{}",
        "\u4f60",
        "\U0001f600",
    ),
)
"""Pieces of random text: what parsers of replies stumble over."""
MAX_FRAGMENTS = 12
NUMBER_RATE = 0.25
"""Share of random texts that are a number, as games of numbers expect."""
LONG_TEXT_RATE = 0.1
LONG_TEXT_REPEATS = 500
MAX_DEPTH = 3
"""Depth below which random arguments are empty lists and objects."""


async def stay_silent(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
    """Return an empty turn."""
    return ""


def make_random_policy(seed: int) -> Policy:
    """Return a policy whose turns depend on `seed` and the number of the turn only."""

    async def policy(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PolicyReply:
        rng = random.Random(f"{seed}/{len(messages)}")
        if tools and rng.random() < CALL_RATE:
            is_valid = rng.random() < VALID_RATE
            return make_call_message([sample_call(rng.choice(tools), rng, is_valid=is_valid)])
        return sample_text(rng)

    return policy


def sample_text(rng: random.Random) -> str:
    if rng.random() < NUMBER_RATE:
        return str(rng.randrange(100))
    text = " ".join(rng.choices(FRAGMENTS, k=rng.randint(1, MAX_FRAGMENTS)))
    return text * LONG_TEXT_REPEATS if rng.random() < LONG_TEXT_RATE else text


def make_call_message(calls: Sequence[tuple[str, Any]]) -> Message:
    """Return an assistant message with calls, as (name, arguments)."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"content": "", "tool_calls": [{"function": function} for function in functions]}


def sample_call(tool: ToolSchema, rng: random.Random, *, is_valid: bool) -> tuple[str, Any]:
    """Return name and arguments of a call.

    is_valid: the arguments match the schema, as far as its types tell; otherwise the name is
    unknown, an argument is missing or unknown, or the arguments are no JSON.
    """
    parameters = tool["function"].get("parameters") or {}
    properties, required = parameters.get("properties", {}), parameters.get("required", ())
    definitions = parameters.get("$defs", {})
    arguments = {
        name: sample_value(schema, rng, definitions)
        for name, schema in properties.items()
        if name in required or rng.random() < VALID_RATE
    }
    name = get_tool_name(tool)
    if is_valid:
        return name, arguments
    fault = rng.randrange(3)
    if fault == 0:
        return f"{name}_{rng.randrange(10)}", arguments
    if fault == 1:
        return name, {"unknown": sample_text(rng)}
    return name, json.dumps(arguments)[: rng.randint(0, 8)] + "{"


def sample_value(
    schema: Any, rng: random.Random, definitions: Mapping[str, Any], depth: int = 0
) -> Any:
    """Return a random value of a JSON schema's type, or one of its enumerated values."""
    schema = schema if isinstance(schema, Mapping) else {}
    if branches := schema.get("anyOf"):
        return sample_value(rng.choice(branches), rng, definitions, depth + 1)
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return sample_value(definitions.get(name), rng, definitions, depth + 1)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum") or [schema.get("const")])
    kind = schema.get("type", "string")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "array":
        count = rng.randrange(3) if depth < MAX_DEPTH else 0
        items = schema.get("items")
        return [sample_value(items, rng, definitions, depth + 1) for _ in range(count)]
    if kind == "object":
        inner = schema.get("properties", {}) if depth < MAX_DEPTH else {}
        return {key: sample_value(part, rng, definitions, depth + 1) for key, part in inner.items()}
    scalars = {
        "integer": rng.choice((0, 1, -1, rng.randrange(100), 2**63)),
        "number": rng.choice((0.0, -1.5, rng.random(), 1e300)),
        "boolean": rng.random() < 1 / 2,
        "null": None,
    }
    return scalars.get(kind, sample_text(rng))
