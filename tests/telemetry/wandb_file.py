"""Reader of offline `.wandb` files: LevelDB's log framing around wandb's protobuf records.

Framing: a file header of 7 bytes, then blocks of 32 KiB counted from the file's start. A block
holds fragments, each under 4 bytes of checksum, 2 of length and 1 of kind; fewer than 7 bytes at
the end of a block are padding. A record is one full fragment, or a first, some middle and a last
fragment.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
_FULL, _LAST = 1, 4


@dataclass
class WandbFile:
    """History rows and alerts in order, the final summary, and the config."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    run_id: str = ""
    run_name: str = ""


def read_wandb_file(path: Path) -> WandbFile:
    """Read one `run-<id>.wandb`."""
    # Protobuf creates its classes at import time.
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    contents = WandbFile()
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            contents.rows.append(_values(record.history.item))
        elif record.HasField("alert"):
            contents.alerts.append((record.alert.title, record.alert.text))
        elif record.HasField("summary"):
            contents.summary |= _values(record.summary.update)
        elif record.HasField("run"):
            contents.config |= _values(record.run.config.update)
            contents.run_id, contents.run_name = record.run.run_id, record.run.display_name
    return contents


def _values(items: Any) -> dict[str, Any]:
    """Return items by name; a nested key becomes nested dicts."""
    values: dict[str, Any] = {}
    for item in items:
        *outer, name = item.nested_key or [item.key]
        nested = values
        for part in outer:
            nested = nested.setdefault(part, {})
        nested[name] = json.loads(item.value_json)
    return values


def _records(data: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    for kind, fragment in _fragments(data):
        parts.append(fragment)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []


def _fragments(data: bytes) -> Iterator[tuple[int, bytes]]:
    assert data.startswith(b":W&B"), "not a .wandb file"
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        offset = _HEADER.size if start == 0 else 0
        while offset + _HEADER.size <= len(block):
            _, length, kind = _HEADER.unpack_from(block, offset)
            offset += _HEADER.size
            yield kind, block[offset : offset + length]
            offset += length
