"""Who takes turns on devices: the arbiter of real runs, on the meshes of a placement."""

import math

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.stream.device_lease import DeviceArbiter, SharedDeviceLease, SuspendableWork

TRAINER_PHASE = "trainer"
"""What all trainers hold their devices for: they work as one."""


class _UntimedArbiter:
    """An arbiter whose holders wait for as long as it takes to be asked to give way."""

    def __init__(self, arbiter: DeviceArbiter) -> None:
        self._arbiter = arbiter
        self.acquire = arbiter.acquire
        self.release = arbiter.release
        self.report_progress = arbiter.report_progress

    async def wait_for_preemption(self, holder: str) -> bool:
        return await self._arbiter.wait_for_preemption(holder, math.inf)


class DeviceLeases:
    """Gives every replica its part in the devices of its role.

    slice_s: as placement.slice_s of a run; on policy a phase keeps its devices to its end.
    """

    def __init__(self, dataflow: Dataflow, placement: Placement, *, slice_s: float) -> None:
        self._trained_roles = dataflow.trained_roles
        self._devices_by_phase: dict[str, set[int]] = {}
        for call in dataflow.calls:
            if call.stage in placement.assignments:
                mesh = placement.assignments[call.stage].mesh
                self._devices_by_phase.setdefault(self._find_phase(call.role), set()).update(
                    mesh.devices
                )
        if not placement.max_staleness:
            slice_s = math.inf
        arbiter = DeviceArbiter(timeout_s=math.inf, slice_s=slice_s, slots=self._devices_by_phase)
        self._arbiter = _UntimedArbiter(arbiter)

    def _find_phase(self, role: str) -> str:
        return TRAINER_PHASE if role in self._trained_roles else role

    def make_lease(
        self, role: str, holder: str, *, suspendable: SuspendableWork | None = None
    ) -> SharedDeviceLease | None:
        """The lease of a replica of a role, or of all trainers; None if nobody else has its
        devices, or it needs none."""
        phase = self._find_phase(role)
        mine = self._devices_by_phase.get(phase, set())
        others = (theirs for other, theirs in self._devices_by_phase.items() if other != phase)
        if not any(mine & theirs for theirs in others):
            return None
        return SharedDeviceLease(self._arbiter, holder, phase, suspendable=suspendable)
