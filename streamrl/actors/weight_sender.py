"""What a rank sends off: its model, and a reference that follows it."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from streamrl.actors.protocols import HostedTrainerRank
from streamrl.actors.shared_weights import SharedWeights
from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.weights import TransportWriter, WeightManifest, WeightsConfig
from streamrl.weights.config import DISK
from streamrl.weights.pack import publish_version


class WeightSender:
    """One rank's part in publishing. Rank 0 has `outlets`, by role, and sends.

    Where parameters have to be gathered all ranks must make the same calls; the others have nothing
    to show for it. What cannot be sent (WeightsError) may be tried again.
    """

    def __init__(
        self,
        trainer: HostedTrainerRank,
        role: str,
        outlets: Mapping[str, TransportWriter],
        config: WeightsConfig,
        reference: EmaReference,
        *,
        residence: SharedWeights | None = None,
    ) -> None:
        """With a `residence` the model is published there, on every rank; a reference never is."""
        self._shared_weights = residence
        self._trainer = trainer
        self._role = role
        self._writers = outlets
        self._config = config
        self._ema_reference = reference
        self._reference_version = -1

    def send_model(self, version: int, readers: Sequence[str]) -> WeightManifest | None:
        """Send the model as it is off as `version`."""
        if self._shared_weights is not None:
            return self._shared_weights.publish_version(self._trainer, version)
        # A policy's directory is there for others, too, who know nothing of adapters.
        is_whole = self._role == POLICY and self._config.transport == DISK
        tensors = self._trainer.merged_state() if is_whole else self._trainer.full_state()
        return self._send_tensors(self._role, iter(tensors), version, readers)

    def send_reference(
        self, version: int, readers: Sequence[str], *, moves: bool
    ) -> WeightManifest | None:
        """Send the reference off as `version`, moved towards the model before if it `moves`."""
        model = iter(self._trainer.full_state())
        # It was moved already if it could only not be sent, and this is another try.
        if self._writers and version > self._reference_version:
            self._ema_reference.update_from_policy(model, moves=moves)
            self._reference_version = version
        self._finish_gather(model)
        return self._send_tensors(
            EMA_REFERENCE, self._ema_reference.named_tensors(), version, readers
        )

    def _send_tensors(
        self,
        role: str,
        tensors: Iterator[tuple[str, Tensor]],
        version: int,
        readers: Sequence[str],
    ) -> WeightManifest | None:
        if not self._writers:
            self._finish_gather(tensors)
            return None
        outlet = self._writers[role]
        outlet.set_readers(readers)
        bucket_bytes = self._config.bucket_bytes
        try:
            return publish_version(
                tensors, version=version, bucket_bytes=bucket_bytes, writer=outlet
            )
        finally:
            # If it could not be sent, the others gather on.
            self._finish_gather(tensors)

    def _finish_gather(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Take part in what is left to be gathered, if anything is."""
        for _ in tensors if self._trainer.has_sharded_params else ():
            pass
