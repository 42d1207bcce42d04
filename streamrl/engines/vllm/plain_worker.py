"""vLLM's CPU worker in a process of its own, without packed weights."""

from vllm.v1.worker.cpu_worker import CPUWorker

from streamrl.engines.vllm.plain_layers import keep_plain_linears


class PlainCpuWorker(CPUWorker):
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Build the model with the patches of `keep_plain_linears`."""
        with keep_plain_linears():
            super().load_model(load_dummy_weights=load_dummy_weights)
