"""The experience queue without a run, for producers and consumers of one's own."""

import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path

from streamrl.actors.queue_shard import create_shards
from streamrl.actors.transport.ray_calls import fetch
from streamrl.actors.transport.shard_proxy import RemoteShard
from streamrl.buffer import Bounds, Files, Ports, QueueConfig, ShardPlan


def start_shards(
    stages: Mapping[str, Ports],
    folder: Path | None,
    *,
    bounds: Bounds,
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
            Files(folder.absolute() / name) if folder is not None else None,
        )
        for name in (f"shard-{i}" for i in range(config.shards))
    }
    shards = create_shards(plans)
    for shard in shards:
        for text in fetch(shard.actor.ready.remote(), f"{shard.name}.ready"):
            warnings.warn(f"{text}; what it held is lost or made again", stacklevel=2)
    return shards
