"""What all replicas of a simulation have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.engines.reference_config import ReferenceConfig
from streamrl.placement.timings import Timings
from streamrl.simulator.following import Versions
from streamrl.simulator.leases import Leases
from streamrl.simulator.machine import Machine
from streamrl.simulator.prompts import Completions
from streamrl.simulator.queue import StreamQueue
from streamrl.simulator.recording import Recording


@dataclass
class Site:
    """`versions` is by the role that is followed; it is new after each restart of the trainers."""

    timings: Timings
    machine: Machine
    queue: StreamQueue
    leases: Leases
    completions: Completions
    recording: Recording
    reference: ReferenceConfig
    versions: Mapping[str, Versions]
