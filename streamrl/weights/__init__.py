"""Weight sync: versions of a model travel in buckets from the trainer to its followers."""

from streamrl.weights.config import WeightsConfig
from streamrl.weights.held_version import LoadVerification, ServedVersion, WeightLoadStats
from streamrl.weights.manifest import (
    TensorMetadata,
    TensorSlot,
    WeightBucket,
    WeightManifest,
    plan_buckets,
)
from streamrl.weights.transport import TransportReader, TransportWriter

__all__ = [
    "LoadVerification",
    "ServedVersion",
    "TensorMetadata",
    "TensorSlot",
    "TransportReader",
    "TransportWriter",
    "WeightBucket",
    "WeightLoadStats",
    "WeightManifest",
    "WeightsConfig",
    "plan_buckets",
]
