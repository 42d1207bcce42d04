"""Weights on their way from the trainer to those who follow it: versions, buckets, checks."""

from streamrl.weights.adapters import full_weights
from streamrl.weights.config import WeightsConfig
from streamrl.weights.manifest import (
    Bucket,
    TensorSlot,
    TensorSpec,
    WeightManifest,
    plan_buckets,
)
from streamrl.weights.parameters import ParameterSet
from streamrl.weights.publisher import pack, publish
from streamrl.weights.subscriber import HeldVersion, Loaded, unpack
from streamrl.weights.transport import Inlet, Outlet

__all__ = [
    "Bucket",
    "HeldVersion",
    "Inlet",
    "Loaded",
    "Outlet",
    "ParameterSet",
    "TensorSlot",
    "TensorSpec",
    "WeightManifest",
    "WeightsConfig",
    "full_weights",
    "pack",
    "plan_buckets",
    "publish",
    "unpack",
]
