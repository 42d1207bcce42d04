"""Who takes turns on devices: the arbiter of real runs, on the meshes of a placement."""

import math

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.stream.device_lease import Arbiter, SharedLease, Suspendable

TRAINERS = "trainer"
"""What all trainers hold their devices for: they work as one."""


class _Patient:
    """An arbiter whose holders wait for as long as it takes to be asked to give way."""

    def __init__(self, arbiter: Arbiter) -> None:
        self._arbiter = arbiter
        self.acquire = arbiter.acquire
        self.release = arbiter.release
        self.progress = arbiter.progress

    async def wanted(self, holder: str) -> bool:
        return await self._arbiter.wanted(holder, math.inf)


class Leases:
    """Gives every replica its part in the devices of its role.

    slice_s: as placement.slice_s of a run; on policy a phase keeps its devices to its end.
    """

    def __init__(self, dataflow: Dataflow, placement: Placement, *, slice_s: float) -> None:
        self._trained = dataflow.trained
        self._devices: dict[str, set[int]] = {}
        for call in dataflow.calls:
            if call.stage in placement.calls:
                mesh = placement.calls[call.stage].mesh
                self._devices.setdefault(self._phase(call.role), set()).update(mesh.devices)
        if not placement.max_staleness:
            slice_s = math.inf
        arbiter = Arbiter(timeout_s=math.inf, slice_s=slice_s, slots=self._devices)
        self._arbiter = _Patient(arbiter)

    def _phase(self, role: str) -> str:
        return TRAINERS if role in self._trained else role

    def of(
        self, role: str, holder: str, *, suspendable: Suspendable | None = None
    ) -> SharedLease | None:
        """The lease of a replica of a role, or of all trainers; None if nobody else has its
        devices, or it needs none."""
        phase = self._phase(role)
        mine = self._devices.get(phase, set())
        others = (theirs for other, theirs in self._devices.items() if other != phase)
        if not any(mine & theirs for theirs in others):
            return None
        return SharedLease(self._arbiter, holder, phase, suspendable=suspendable)
