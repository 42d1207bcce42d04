"""What all replicas of a simulation have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.engines.reference_config import ReferenceConfig
from streamrl.placement.stage_timings import Timings
from streamrl.simulator.replicas.cpu_model import Machine
from streamrl.simulator.replicas.device_leases import Leases
from streamrl.simulator.replicas.prompts import Completions
from streamrl.simulator.replicas.queue import StreamQueue
from streamrl.simulator.replicas.recorder import Recording
from streamrl.simulator.replicas.weight_followers import Versions


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
