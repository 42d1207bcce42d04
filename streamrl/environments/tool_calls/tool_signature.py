"""Tool schemas in one line, for people."""

import json
from collections.abc import Mapping
from typing import Any

from streamrl.environments.interface import ToolSchema


def format_tool(tool: ToolSchema) -> str:
    """Return a tool as `search(query: string, limit: integer = 3): Search the web.`"""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required", ())
    written = []
    for name, schema in parameters.get("properties", {}).items():
        text = f"{name}: {_format_type(schema)}"
        if name not in required:
            default = schema.get("default") if isinstance(schema, Mapping) else None
            text += f" = {json.dumps(default, ensure_ascii=False)}"
        written.append(text)
    return f"{function['name']}({', '.join(written)}): {function.get('description', '')}".rstrip()


def _format_type(schema: Any) -> str:
    if not isinstance(schema, Mapping):
        return "any"
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(_format_type(branch) for branch in schema["anyOf"])
    kind = schema.get("type", "any")
    return " | ".join(kind) if isinstance(kind, list) else str(kind)
