"""Experience queue: shards that own groups, the client, admission control and the ledger."""

from streamrl.buffer.admission.staleness_credits import AdmissionController
from streamrl.buffer.assembly.step_assembler import StepAssembler
from streamrl.buffer.books.ledger import Ledger
from streamrl.buffer.books.run_log import RunLog
from streamrl.buffer.client import ExperienceQueue
from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.shard import QueueShard
from streamrl.buffer.shard_host import ShardFiles, ShardHost, ShardPlan
from streamrl.buffer.wire_types import ShardStats

__all__ = [
    "AdmissionController",
    "ExperienceQueue",
    "Ledger",
    "QueueConfig",
    "QueueShard",
    "RunLog",
    "ShardCapacity",
    "ShardFiles",
    "ShardHost",
    "ShardPlan",
    "ShardStats",
    "StageSchema",
    "StepAssembler",
]
