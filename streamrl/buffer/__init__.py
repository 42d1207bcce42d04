"""The experience queue: shards that own groups, the client stages use, admission and accounts."""

from streamrl.buffer.admission import Admission
from streamrl.buffer.assembly import StepAssembler
from streamrl.buffer.client import ExperienceQueue
from streamrl.buffer.ledger import Ledger
from streamrl.buffer.shard import Ports, QueueConfig, Shard, ShardStats

__all__ = [
    "Admission",
    "ExperienceQueue",
    "Ledger",
    "Ports",
    "QueueConfig",
    "Shard",
    "ShardStats",
    "StepAssembler",
]
