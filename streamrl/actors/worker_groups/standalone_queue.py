"""Experience queue without a run, for producers and consumers that a user writes."""

import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path

from streamrl.actors.queue_shard import create_shards
from streamrl.actors.transport.ray_calls import fetch_reply
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.buffer import QueueConfig, ShardCapacity, ShardFiles, ShardPlan, StageSchema


def start_shards(
    stages: Mapping[str, StageSchema],
    folder: Path | None,
    *,
    bounds: ShardCapacity,
    config: QueueConfig | None = None,
) -> list[RemoteShard]:
    """Start the shards of an experience queue; return their proxies. Ray must be initialized.

    stages: columns that each stage requires and commits. bounds: capacity of a shard.
    folder: folder for the journals; None for a queue without journals.

    Shards recover the groups that an earlier program left in the folder, unleased; a warning names
    each unreadable record.
    """
    config, session = config or QueueConfig(), uuid.uuid4().hex
    plans = {
        name: ShardPlan(
            stages,
            config,
            bounds,
            session,
            ShardFiles(folder.absolute() / name) if folder is not None else None,
        )
        for name in (f"shard-{i}" for i in range(config.shards))
    }
    shards = create_shards(plans)
    for shard in shards:
        for text in fetch_reply(shard.actor.open_shard.remote(), f"{shard.name}.open_shard"):
            warnings.warn(f"{text}; its groups are lost or must be made again", stacklevel=2)
    return shards
