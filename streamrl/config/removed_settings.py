"""Settings of earlier versions, which the configs of old runs still name."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import format_yaml

REMOVED_SETTINGS: Mapping[str, object] = {
    "run.debug": False,
    "algorithm.advantage_eps": 1e-6,
    "generator.request_timeout_s": 600.0,
    "queue.journal.max_mb": 4096,
    "weights.bucket_mb": 64,
    "queue.hedge_s": None,
    "queue.journal.fsync_s": 0.0,
    "data.prompt_key": "prompt",
    "data.max_bad_share": 0.1,
    "algorithm.advantage_unbiased": True,
    "algorithm.kl_horizon": 10_000.0,
    "algorithm.count_truncated": True,
    "algorithm.correction.count_rejected": True,
    "pipeline.outage_s": 1800.0,
    "environment.tools[].memory_mib": 512,
    "environment.tools[].cpu_s": 60.0,
    "environment.tools[].share": False,
    "environment.named.*.tools[].memory_mib": 512,
    "environment.named.*.tools[].cpu_s": 60.0,
    "environment.named.*.tools[].share": False,
    "environment.call_timeout_s": 30.0,
    "environment.parallel_calls": 1,
    "environment.max_reply_chars": 2000,
    "environment.max_malformed": 3,
    "environment.attempts": 3,
    "environment.min_episodes": None,
    "environment.on_timeout": "mask",
    "scorer.combine": "",
    "filter.options": {},
    "trainer.warmup_ratio": 0.0,
    "critic.trainer.warmup_ratio": 0.0,
    "trainer.lr_schedule_options": {},
    "critic.trainer.lr_schedule_options": {},
    "trainer.lora_targets": [],
    "critic.trainer.lora_targets": [],
    "queue.capacity_groups": None,
    "queue.store_share": 0.5,
    "queue.max_drop_rounds": 10,
    "weights.keep_versions": 2,
    "weights.on_update": "interrupt",
    "weights.on_device": False,
    "evaluation.concurrency": 64,
    "telemetry.rollouts.max_gib": 1.0,
    "telemetry.wandb.entity": "",
    "telemetry.trace": True,
    "telemetry.sinks": ["jsonl", "wandb"],
}
"""Keys of earlier versions, with the value that holds now.

Run directories of these versions name all of them. `[]` stands for the entries of a list, `*` for
the names of a mapping.
"""

REMOVED_VALUES = {
    "weights.transport=delta": "use auto, which sends whole versions",
    "weights.transport=disk": "an engine outside the run reads checkpoints/step_*/model",
    "environment.kind=gymnasium": "examples/text_games has it as a class",
    "environment.kind=textarena": "examples/text_games has it as a class",
    "environment.kind=textworld": "examples/text_games has it as a class",
    "filter.kind=mean_outside": "use kind function, with path and function",
    "data.on_long_prompt=truncate": "use skip, or shorten the prompts",
}
"""Values of earlier versions, with what takes their place."""
REPLACEMENTS = {
    "filter.options": "kind function has path and function in the section filter",
    "telemetry.sinks": (
        "metrics.jsonl is always written, and telemetry.wandb.mode=disabled turns wandb off"
    ),
    "data.prompt_key": "set prompt_key per file, beside its path",
    "environment.call_timeout_s": "half of environment.turn_timeout_s holds now",
    "queue.hedge_s": "use pipeline.on_stall=redeliver",
    "telemetry.wandb.entity": "wandb reads WANDB_ENTITY",
    "environment.tools[].share": "name a server that keeps nothing between calls by url",
    "environment.named.*.tools[].share": "name a server that keeps nothing between calls by url",
    "scorer.combine": "use a reward of kind function",
    "trainer.lora_targets": "all linear layers but the head have adapters",
    "critic.trainer.lora_targets": "all linear layers but the head have adapters",
    "queue.journal.fsync_s": "use queue.journal.fsync, true or false",
    "trainer.warmup_ratio": "use trainer.warmup_steps",
    "critic.trainer.warmup_ratio": "use critic.trainer.warmup_steps",
    "trainer.lr_schedule_options": "use trainer.lr_min and trainer.lr_decay_steps",
    "critic.trainer.lr_schedule_options": "use lr_min and lr_decay_steps",
}
"""What takes the place of a removed key, where no constant does."""


def drop_removed_settings(raw: Any) -> Any:
    """Return settings as read, written as today, without the keys of REMOVED_SETTINGS.

    Raises ConfigError for one with another value than the one that holds now, and for
    REMOVED_VALUES.
    """
    raw = copy.deepcopy(raw)
    for section in _iter_sections(raw, ["filter"]):
        options = section.get("options")
        if isinstance(options, dict) and options.keys() == {"path", "function"}:
            section.update(section.pop("options"))
    for parents in (["trainer"], ["critic", "trainer"]):
        for section in _iter_sections(raw, parents):
            _rename_schedule(section)
    for setting, instead in REMOVED_VALUES.items():
        parent, name, value = re.split("[.=]", setting)
        if any(section.get(name) == value for section in _iter_sections(raw, [parent])):
            raise ConfigError(f"{setting}: no longer a value; {instead}")
    for key, value in REMOVED_SETTINGS.items():
        *parents, name = key.replace("[]", ".*").split(".")
        for section in _iter_sections(raw, parents):
            if (given := section.pop(name, value)) != value:
                instead = REPLACEMENTS.get(key, f"{format_yaml(value)} holds now")
                raise ConfigError(
                    f"{key}={format_yaml(given)}: no longer a setting; {instead}; remove the key,"
                    " in a run that you resume from its config.yaml"
                )
    return raw


def _rename_schedule(section: dict[str, Any]) -> None:
    """Write a schedule of the learning rate of earlier versions, in place, as the same of today."""
    match section.get("lr_schedule"), section.get("lr_schedule_options"):
        case "constant_with_warmup", _:
            section["lr_schedule"] = "constant"
        case "cosine_with_min_lr", _:
            section["lr_schedule"] = "cosine"
        # Without lr_min it fell to 1e-7.
        case "polynomial", _ if section.get("lr_min") is not None:
            section["lr_schedule"] = "linear"
        case "warmup_stable_decay", {"num_decay_steps": steps, **others} if not others:
            section |= {"lr_schedule": "cosine", "lr_decay_steps": steps, "lr_schedule_options": {}}


def _iter_sections(raw: Any, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the mappings at a path of names, where `*` stands for all entries."""
    if not names:
        if isinstance(raw, dict):
            yield raw
    elif names[0] == "*":
        entries = raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ()
        for entry in entries:
            yield from _iter_sections(entry, names[1:])
    elif isinstance(raw, dict) and names[0] in raw:
        yield from _iter_sections(raw[names[0]], names[1:])
