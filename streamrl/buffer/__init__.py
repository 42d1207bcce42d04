"""The experience queue: shards that own groups, the client stages use, admission and accounts."""

from streamrl.buffer.admission.staleness_credits import Admission
from streamrl.buffer.assembly.step_assembler import StepAssembler
from streamrl.buffer.books.ledger import Ledger
from streamrl.buffer.books.run_log import Books
from streamrl.buffer.client import ExperienceQueue
from streamrl.buffer.config import Bounds, Ports, QueueConfig
from streamrl.buffer.shard import Shard
from streamrl.buffer.shard_host import Files, ShardKeeper, ShardPlan
from streamrl.buffer.wire_types import ShardStats

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
