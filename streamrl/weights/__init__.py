"""Weight sync: versions of a model travel in buckets from the trainer to its followers."""

from streamrl.weights.config import WeightsConfig
from streamrl.weights.transport import TransportReader, TransportWriter
from streamrl.weights.versions import (
    LoadVerification,
    ServedVersion,
    TensorSlot,
    WeightBucket,
    WeightLoadStats,
    WeightManifest,
)

__all__ = [
    "LoadVerification",
    "ServedVersion",
    "TensorSlot",
    "TransportReader",
    "TransportWriter",
    "WeightBucket",
    "WeightLoadStats",
    "WeightManifest",
    "WeightsConfig",
]
