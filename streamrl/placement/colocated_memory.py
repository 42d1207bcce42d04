"""What a hybrid worker holds in each phase, and what it gives up to stay within a budget."""

from dataclasses import dataclass, replace

from streamrl.errors import ConfigError

MIB = 1 << 20


@dataclass(frozen=True)
class WorkerMemory:
    """What the engines of one hybrid worker hold, in bytes; libraries come on top.

    weights: the trainer's. served: the generator's own, where it cannot use those. optimizer: with
    master weights, if there are any. gradients: kept from micro-batch to micro-batch, with what
    they are reduced in, if that stays. activations: of one micro-batch, about, with what is
    gathered and reduced for it. update: what an update takes on top, when there are no activations.
    kv: keys and values.
    """

    weights: int
    serving_weights: int
    optimizer: int
    gradients: int
    activations: int
    update_buffers: int
    kv_cache: int
    releases_kv: bool = False
    offloads_optimizer: bool = False

    @property
    def generate_bytes(self) -> int:
        """While it samples, and while others score."""
        return (
            self._resident_bytes
            + self.kv_cache
            + (0 if self.offloads_optimizer else self.optimizer)
        )

    @property
    def train_bytes(self) -> int:
        """While it trains: in a micro-batch or in an update, whichever takes more."""
        kv = 0 if self.releases_kv else self.kv_cache
        return (
            self._resident_bytes + self.optimizer + max(self.activations, self.update_buffers) + kv
        )

    def fit_budget(self, budget_mb: int | None) -> "WorkerMemory":
        """With the KV cache released while it trains, and the optimizer's state offloaded while it
        generates, where it has to be; None is no bound.

        Raises ConfigError with the arithmetic if that is not enough.
        """
        if budget_mb is None:
            return self
        least = replace(
            self,
            releases_kv=self.train_bytes > budget_mb * MIB,
            offloads_optimizer=self.generate_bytes > budget_mb * MIB,
        )
        for phase, needed in (("train", least.train_bytes), ("generate", least.generate_bytes)):
            if needed > budget_mb * MIB:
                raise ConfigError(
                    f"placement.memory_mb={budget_mb}: to {phase}, a worker holds"
                    f" {_format_mb(needed)} MB = {least.format_sum(phase)}"
                )
        return least

    def format_sum(self, phase: str) -> str:
        """What is held to generate, or to train, as a sum in MB."""
        parts = {
            "weights": self.weights,
            "the generator's weights": self.serving_weights,
            "optimizer": self.optimizer,
            "gradients": self.gradients,
        }
        if phase == "generate" and self.offloads_optimizer:
            del parts["optimizer"]
        if phase == "train":
            updates = self.update_buffers > self.activations
            most = max(self.activations, self.update_buffers)
            parts["for the update" if updates else "activations"] = most
        if phase == "generate" or not self.releases_kv:
            parts["KV cache"] = self.kv_cache
        return " + ".join(f"{_format_mb(size)} {what}" for what, size in parts.items() if size)

    @property
    def summary_line(self) -> str:
        """All of it for the user to read."""
        given_up = ["", "; the KV cache is released while it trains"][self.releases_kv]
        if self.offloads_optimizer:
            given_up += "; the optimizer's state is offloaded while it generates"
        return (
            f"memory: a worker holds {_format_mb(self.generate_bytes)} MB to generate ="
            f" {self.format_sum('generate')},"
            f" and about {_format_mb(self.train_bytes)} MB to train ="
            f" {self.format_sum('train')}{given_up}"
        )

    @property
    def _resident_bytes(self) -> int:
        return self.weights + self.serving_weights + self.gradients


def _format_mb(num_bytes: int) -> str:
    """Whole MB, rounded up, as the sum must not look smaller than it is."""
    return str(-(-num_bytes // MIB))
