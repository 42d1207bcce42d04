"""The experience queue without a run, for producers and consumers of one's own."""

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
    """The shards of a queue, with their journals in `folder`; without one they forget in death.

    What an earlier program left in the folder is there again, and nobody holds a lease on it; a
    warning names what could not be read of it. `bounds` is the most that each shard holds. Ray must
    have been initialised.
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
        for text in fetch_reply(shard.actor.open_shard.remote(), f"{shard.name}.ready"):
            warnings.warn(f"{text}; what it held is lost or made again", stacklevel=2)
    return shards
