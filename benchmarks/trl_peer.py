"""TRL's GRPO on a task of `benchmarks.trl`, run with the parity environment's Python.

`python -m benchmarks.trl_peer SPEC`: SPEC is a JSON file with the fields of
`benchmarks.trl.PeerSpec`. Appends a line per step to the file that SPEC names.
"""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

for engine in ("deepspeed", "vllm"):
    # Unused here; importing them would be a large part of the start-up time of TRL and accelerate.
    sys.modules[engine] = None  # type: ignore[assignment]

from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def main(spec: dict[str, Any]) -> None:
    lines = Path(spec["rows"]).read_text().splitlines()
    rows = [
        {"prompt": row["prompt"], "truth": row["reward_model"]["ground_truth"]}
        for row in map(json.loads, lines)
    ]
    log = StepLog(Path(spec["steps_file"]), re.compile(spec["pattern"]))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype="float32"),
        processing_class=PreTrainedTokenizerFast.from_pretrained(spec["model"]),
        reward_funcs=log.score,
        args=make_grpo_config(spec),
        train_dataset=Dataset.from_list(rows),
        callbacks=[log],
    )
    trainer.train()


def make_grpo_config(spec: dict[str, Any]) -> GRPOConfig:
    """Translate our settings into TRL's; turn off defaults that only cost time."""
    return GRPOConfig(
        output_dir=spec["folder"],
        use_cpu=True,
        bf16=False,
        # One pass for all rollouts of a step is faster here than several.
        per_device_train_batch_size=spec["groups"] * spec["group_size"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=spec["grad_clip"],
        loss_type="grpo",
        beta=0.0,
        seed=spec["seed"],
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )


class StepLog(TrainerCallback):
    """Reward of kind `exact_estimator`, and a log line per step."""

    # GRPOTrainer logs a reward under its function's name.
    __name__ = "exact"

    def __init__(self, path: Path, pattern: re.Pattern[str]) -> None:
        self._path = path
        self._pattern = pattern
        self._ended_at = 0.0
        self._tokens = 0
        self._reward = 0.0

    def score(
        self, completions: list[Any], completion_ids: list[list[int]], truth: list[str], **_: Any
    ) -> list[float]:
        """Return 1 for each completion whose last match of the pattern is the ground truth,
        else 0."""
        # For chat prompts, completions are chat messages too.
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        matches = [self._pattern.findall(text) for text in texts]
        scores = [float(bool(f) and f[-1] == t) for f, t in zip(matches, truth, strict=True)]
        self._tokens = sum(map(len, completion_ids))
        self._reward = sum(scores) / len(scores)
        return scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.perf_counter()
        line = {
            "step": state.global_step,
            "time": time.time(),
            "seconds": now - self._ended_at,
            "tokens": self._tokens,
            "reward": self._reward,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._ended_at = now


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
