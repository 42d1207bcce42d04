"""Experience queue: shards that own groups, the client, admission control and the ledger."""

from streamrl.buffer.client import ExperienceQueue
from streamrl.buffer.config import QueueConfig, ShardCapacity, StageSchema
from streamrl.buffer.durable_shard import DurableShard, ShardFiles, ShardPlan
from streamrl.buffer.run_log import Ledger, RunLog
from streamrl.buffer.shard import QueueShard, ShardStats
from streamrl.buffer.staleness_credits import AdmissionController
from streamrl.buffer.step_assembler import StepAssembler

__all__ = [
    "AdmissionController",
    "DurableShard",
    "ExperienceQueue",
    "Ledger",
    "QueueConfig",
    "QueueShard",
    "RunLog",
    "ShardCapacity",
    "ShardFiles",
    "ShardPlan",
    "ShardStats",
    "StageSchema",
    "StepAssembler",
]
