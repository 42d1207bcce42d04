"""Log-probabilities of finished rollouts under a model that is not trained: the reference."""

import torch

from streamrl.engines.batching import build_batch
from streamrl.engines.forward import load_model, local_device, resolve_dtype, token_logprobs
from streamrl.engines.packing import pack
from streamrl.messages import Array, Columns, split_tokens


class LogprobScorer:
    """Scores groups with a Hugging Face model, in micro-batches of bounded size."""

    def __init__(
        self,
        model_path: str,
        *,
        temperature: float,
        micro_batch_tokens: int,
        threads: int = 1,
        dtype: str = "auto",
    ) -> None:
        torch.set_num_threads(threads)
        self._model = load_model(model_path, dtype=resolve_dtype(dtype)).eval()
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens

    def ref_logprobs(self, columns: Columns) -> dict[str, Array]:
        """The ref_logprobs column of a group with token_ids, loss_mask and lengths.

        At the sampling temperature, as all log-probabilities here; 0 where loss_mask is false.
        Raises ValueError if a rollout is longer than a micro-batch may be.
        """
        lengths = columns["lengths"]
        result = columns["loss_mask"].astype("float32")
        rows = split_tokens(result, lengths)
        rounds = pack(
            [("", index, int(length)) for index, length in enumerate(lengths)],
            world_size=1,
            micro_batch_tokens=self._micro_batch_tokens,
        )
        for (picks,) in rounds:
            batch = build_batch(
                {"": columns}, picks, derived={"": {}}, token_columns=("token_ids",)
            ).to(local_device())
            with torch.inference_mode():
                scores = token_logprobs(
                    self._model,
                    batch["token_ids"],
                    batch["attention_mask"],
                    temperature=self._temperature,
                )
            for (_, index), logprobs in zip(picks, scores.logprobs.cpu().numpy(), strict=True):
                rows[index] *= logprobs[: lengths[index]]
        return {"ref_logprobs": result}
