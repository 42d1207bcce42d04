"""Weights on their way from the trainer to those who follow it: versions, buckets, checks."""

from streamrl.weights.config import WeightsConfig
from streamrl.weights.held_version import Arrival, HeldVersion, Loaded
from streamrl.weights.manifest import (
    Bucket,
    TensorSlot,
    TensorSpec,
    WeightManifest,
    plan_buckets,
)
from streamrl.weights.transport_protocol import Inlet, Outlet

__all__ = [
    "Arrival",
    "Bucket",
    "HeldVersion",
    "Inlet",
    "Loaded",
    "Outlet",
    "TensorSlot",
    "TensorSpec",
    "WeightManifest",
    "WeightsConfig",
    "plan_buckets",
]
