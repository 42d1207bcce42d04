"""Publishing by a trainer rank: send the model and the EMA reference to their followers."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from streamrl.actors.shared_weights import SharedWeights
from streamrl.dataflow import EMA_REFERENCE, POLICY
from streamrl.engines.training.ema_reference import EmaReference
from streamrl.engines.training.trainer import ModelTrainer
from streamrl.weights import TransportWriter, WeightManifest, WeightsConfig
from streamrl.weights.buckets import publish_version
from streamrl.weights.config import DISK


class WeightSender:
    """Publishes the weights of a trainer rank. Only rank 0 sends; it has the transport writers.

    With sharded parameters every rank must make the same calls, since they gather the tensors for
    rank 0. After a WeightsError the call may be repeated.
    """

    def __init__(
        self,
        trainer: ModelTrainer,
        role: str,
        writers: Mapping[str, TransportWriter],
        config: WeightsConfig,
        reference: EmaReference,
        *,
        shared_weights: SharedWeights | None = None,
    ) -> None:
        """Prepare publishing.

        writers: transport writers by role; empty except on rank 0.
        shared_weights: weights shared with a generator in this process. The model is then published
        in place on every rank, while the EMA reference still goes through its writer.
        """
        self._shared_weights = shared_weights
        self._trainer = trainer
        self._role = role
        self._writers = writers
        self._config = config
        self._ema_reference = reference
        self._reference_version = -1

    def send_model(self, version: int, readers: Sequence[str]) -> WeightManifest | None:
        """Publish the model as `version`; return its manifest, None on ranks that do not send."""
        if self._shared_weights is not None:
            return self._shared_weights.publish_version(self._trainer, version)
        # Other programs load a policy from disk and do not know adapters: write merged weights.
        is_whole = self._role == POLICY and self._config.transport == DISK
        tensors = self._trainer.merged_state() if is_whole else self._trainer.full_state()
        return self._send_tensors(self._role, iter(tensors), version, readers)

    def send_reference(self, version: int, readers: Sequence[str]) -> WeightManifest | None:
        """Publish the EMA reference as `version`; return its manifest, None on ranks but 0.

        Updates the reference from the current model first, except for the first version of this
        process: there the reference is that of the checkpoint, or equals the model.
        """
        model = iter(self._trainer.full_state())
        # On a retry the reference was already updated; only the send failed.
        if self._writers and version > self._reference_version:
            is_first = self._reference_version < 0
            self._ema_reference.update_from_policy(model, moves=not is_first)
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
        """Send tensors by the role's writer; a rank without writers only takes part in gathers."""
        if not self._writers:
            self._finish_gather(tensors)
            return None
        writer = self._writers[role]
        writer.set_readers(readers)
        bucket_bytes = self._config.bucket_bytes
        try:
            return publish_version(
                tensors, version=version, bucket_bytes=bucket_bytes, writer=writer
            )
        finally:
            # After a failed send the other ranks still gather the remaining tensors.
            self._finish_gather(tensors)

    def _finish_gather(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Exhaust `tensors`: every rank must take part in each collective that gathers a tensor."""
        for _ in tensors if self._trainer.has_sharded_params else ():
            pass
