"""Conversations of a group's episodes as a column, from their environment to their rewards."""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.messages import Array

Conversation = Sequence[Mapping[str, Any]]
"""Chat messages in OpenAI's form; arguments of tool calls are objects."""


def encode_conversations(conversations: Sequence[Conversation]) -> Array:
    """Return the column `conversations` of a group, uint8 [B]: JSON, compressed."""
    plain = [[dict(message) for message in messages] for messages in conversations]
    text = json.dumps(plain, ensure_ascii=False, default=str)
    # A tool's output may have lone surrogates, which UTF-8 cannot encode.
    return np.frombuffer(zlib.compress(text.encode("utf-8", "replace"), level=1), np.uint8)


def decode_conversations(column: Array) -> list[Conversation]:
    """Return the chat messages of each rollout."""
    conversations: list[Conversation] = json.loads(zlib.decompress(column.tobytes()))
    return conversations
