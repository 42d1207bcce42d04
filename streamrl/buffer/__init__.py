"""The experience queue: shards that own groups, the client stages use, admission and accounts."""

from streamrl.buffer.admission import Admission
from streamrl.buffer.assembly import StepAssembler
from streamrl.buffer.books import Books
from streamrl.buffer.client import ExperienceQueue
from streamrl.buffer.config import Bounds, Ports, QueueConfig
from streamrl.buffer.exchange import ShardStats
from streamrl.buffer.keeper import Files, ShardKeeper, ShardPlan
from streamrl.buffer.ledger import Ledger
from streamrl.buffer.shard import Shard

__all__ = [
    "Admission",
    "Books",
    "Bounds",
    "ExperienceQueue",
    "Files",
    "Ledger",
    "Ports",
    "QueueConfig",
    "Shard",
    "ShardKeeper",
    "ShardPlan",
    "ShardStats",
    "StepAssembler",
]
