"""Device leases of a simulation: the real arbiter on the meshes of a placement."""

import math

from streamrl.dataflow import Dataflow
from streamrl.placement.placements import Placement
from streamrl.stream.device_lease import DeviceArbiter, SharedDeviceLease, SuspendableWork

TRAINER_PHASE = "trainer"
"""All trainers hold their devices in one common phase."""


class _UntimedArbiter:
    """Device arbiter in which waiting for a preemption never times out.

    In virtual time each poll of the real arbiter would cost an event.
    """

    def __init__(self, arbiter: DeviceArbiter) -> None:
        self._arbiter = arbiter
        self.acquire = arbiter.acquire
        self.release = arbiter.release
        self.report_progress = arbiter.report_progress

    async def wait_for_preemption(self, holder: str) -> bool:
        return await self._arbiter.wait_for_preemption(holder, math.inf)


class DeviceLeases:
    """Maker of the device leases of all simulated replicas.

    slice_s: placement.slice_s of a run. On policy a phase keeps its devices until its work ends.
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
        """Return the device lease of a replica, or of all trainers together.

        Return None if its phase shares no device with other phases, or has no devices.

        suspendable: work to suspend when the arbiter preempts the lease.
        """
        phase = self._find_phase(role)
        devices = self._devices_by_phase.get(phase, set())
        other_phases = (
            other_devices
            for other, other_devices in self._devices_by_phase.items()
            if other != phase
        )
        if not any(devices & other_devices for other_devices in other_phases):
            return None
        return SharedDeviceLease(self._arbiter, holder, phase, suspendable=suspendable)
