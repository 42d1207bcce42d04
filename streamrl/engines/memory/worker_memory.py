"""Memory of a colocated worker per phase, and the offloads that keep the worker within a budget.

A colocated worker is a process that both trains and generates.
"""

from dataclasses import dataclass, replace

from streamrl.errors import ConfigError

MIB = 1 << 20
CUDA_CONTEXT_BYTES = 512 * MIB
"""GPU memory of a process besides its tensors: CUDA's context, loaded kernels and cuBLAS's
workspace. Users of torch report 300 to 550 MiB; not measured here."""
NCCL_GROUP_BYTES = 512 * MIB
"""GPU memory of an NCCL communicator: per channel and peer 4 MiB and the buffers of small
messages. Grows with the links of a node, not with nodes; not measured here."""


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes that a trainer rank holds, with the generator of its process in a colocated worker.

    Host memory of libraries is not counted.

    weights: the trainer's weights.
    serving_weights: the generator's copy, if it cannot alias the trainer's weights.
    optimizer: optimizer state, with master weights if any.
    gradients: accumulated gradients and persistent reduction buffers.
    activations: estimate for a micro-batch, with its gather and reduce buffers.
    update_buffers: temporary buffers of an optimizer step and of the version that follows it, when
      activations are free.
    kv_cache: keys and values.
    libraries: on a GPU, CUDA's context and the buffers of NCCL.
    """

    weights: int
    serving_weights: int
    optimizer: int
    gradients: int
    activations: int
    update_buffers: int
    kv_cache: int
    libraries: int = 0
    releases_kv: bool = False
    offloads_optimizer: bool = False

    @property
    def generate_bytes(self) -> int:
        return sum(self._list_parts("generate").values())

    @property
    def train_bytes(self) -> int:
        """Peak bytes of a colocated worker in training: in a micro-batch or an optimizer step."""
        return sum(self._list_parts("train").values())

    def _list_parts(self, phase: str) -> dict[str, int]:
        """Return the bytes that are held in a phase, "train" or "generate", by what they are."""
        is_training, updates = phase == "train", self.update_buffers > self.activations
        return {
            "weights": self.weights,
            "the generator's weights": self.serving_weights,
            "optimizer": self.optimizer if is_training or not self.offloads_optimizer else 0,
            "gradients": self.gradients,
            "for the update" if updates else "activations": (
                max(self.activations, self.update_buffers) if is_training else 0
            ),
            "KV cache": 0 if is_training and self.releases_kv else self.kv_cache,
            "CUDA and NCCL": self.libraries,
        }

    def fit_budget(self, budget_mb: int | None) -> "WorkerMemory":
        """Return the memory with the offloads that a budget in MiB requires; None means no budget.

        The KV cache is released during training, and the optimizer state is offloaded during
        generation. Raise ConfigError with the sum of bytes if both measures together do not
        suffice.
        """
        if budget_mb is None:
            return self
        reduced = replace(
            self,
            releases_kv=self.train_bytes > budget_mb * MIB,
            offloads_optimizer=self.generate_bytes > budget_mb * MIB,
        )
        for phase, needed in (("train", reduced.train_bytes), ("generate", reduced.generate_bytes)):
            if needed > budget_mb * MIB:
                raise ConfigError(
                    f"placement.memory_mb={budget_mb}: to {phase}, a worker holds"
                    f" {_format_mb(needed)} MB = {reduced.format_sum(phase)}"
                )
        return reduced

    def format_sum(self, phase: str) -> str:
        """Format the bytes in a phase, "train" or "generate", as a sum of parts in MB."""
        parts = self._list_parts(phase)
        return " + ".join(f"{_format_mb(size)} {name}" for name, size in parts.items() if size)

    @property
    def summary_line(self) -> str:
        """Console line: estimated memory of a colocated worker to generate and to train, in parts.

        The line ends with what is freed to stay within `placement.memory_mb`.
        """
        offloads = ["", "; the KV cache is released while it trains"][self.releases_kv]
        if self.offloads_optimizer:
            offloads += "; the optimizer's state is offloaded while it generates"
        return (
            f"memory: a worker holds {_format_mb(self.generate_bytes)} MB to generate ="
            f" {self.format_sum('generate')},"
            f" and about {_format_mb(self.train_bytes)} MB to train ="
            f" {self.format_sum('train')}{offloads}"
        )


def _format_mb(num_bytes: int) -> str:
    """Format bytes as whole MB, rounded up so that the sum of a worker never looks too small."""
    return str(-(-num_bytes // MIB))
