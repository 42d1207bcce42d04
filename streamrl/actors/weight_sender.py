"""What a rank sends off: its model, and a reference that follows it."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from streamrl.actors.protocols import HostedRank
from streamrl.actors.shared_weights import Residence
from streamrl.dataflow import MOVED, POLICY
from streamrl.engines.training.ema_reference import MovingReference
from streamrl.weights import Outlet, WeightManifest, WeightsConfig
from streamrl.weights.config import DISK
from streamrl.weights.pack import publish


class Sender:
    """One rank's part in publishing. Rank 0 has `outlets`, by role, and sends.

    Where parameters have to be gathered all ranks must make the same calls; the others have nothing
    to show for it. What cannot be sent (WeightsError) may be tried again.
    """

    def __init__(
        self,
        trainer: HostedRank,
        role: str,
        outlets: Mapping[str, Outlet],
        config: WeightsConfig,
        reference: MovingReference,
        *,
        residence: Residence | None = None,
    ) -> None:
        """With a `residence` the model is published there, on every rank; a reference never is."""
        self._residence = residence
        self._trainer = trainer
        self._role = role
        self._outlets = outlets
        self._config = config
        self._reference = reference
        self._followed = -1

    def model(self, version: int, readers: Sequence[str]) -> WeightManifest | None:
        """Send the model as it is off as `version`."""
        if self._residence is not None:
            return self._residence.publish(self._trainer, version)
        # A policy's directory is there for others, too, who know nothing of adapters.
        is_whole = self._role == POLICY and self._config.transport == DISK
        tensors = self._trainer.whole_state() if is_whole else self._trainer.full_state()
        return self._send(self._role, iter(tensors), version, readers)

    def reference(
        self, version: int, readers: Sequence[str], *, moves: bool
    ) -> WeightManifest | None:
        """Send the reference off as `version`, moved towards the model before if it `moves`."""
        model = iter(self._trainer.full_state())
        # It was moved already if it could only not be sent, and this is another try.
        if self._outlets and version > self._followed:
            self._reference.follow(model, moves=moves)
            self._followed = version
        self._gather(model)
        return self._send(MOVED, self._reference.named_tensors(), version, readers)

    def _send(
        self,
        role: str,
        tensors: Iterator[tuple[str, Tensor]],
        version: int,
        readers: Sequence[str],
    ) -> WeightManifest | None:
        if not self._outlets:
            self._gather(tensors)
            return None
        outlet = self._outlets[role]
        outlet.set_readers(readers)
        bucket_bytes = self._config.bucket_bytes
        try:
            return publish(tensors, version=version, bucket_bytes=bucket_bytes, outlet=outlet)
        finally:
            # If it could not be sent, the others gather on.
            self._gather(tensors)

    def _gather(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take part in what is left to be gathered, if anything is."""
        for _ in tensors if self._trainer.gathers else ():
            pass
