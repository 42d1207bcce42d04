"""Run directories from simulations, in the format of real runs."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from streamrl.buffer.journal import Journal, JournalConfig, JournalRecord
from streamrl.buffer.run_log import TrainedStep
from streamrl.config.run_config import RunConfig, dump_config, load_config
from streamrl.dataflow import POLICY
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import EmpiricalLengths, Workload
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.to_placement import build_run_placement
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir
from streamrl.telemetry.chrome_trace import TraceSink
from streamrl.telemetry.sinks import JsonlSink, MetricsSink

EPOCH_S = 1e9
LENGTHS = EmpiricalLengths.from_samples([*range(2, 12), 20, 31])
TRUE = StageTimings(
    GeneratorTiming(1, 64, 1e6, 2e-4, 1e-7, 1.5e-5, 4e-3, 2e-4, 5e-5, 0.012, 5e-5),
    {"reward": ScoreTiming(1, 32, 3e-3, 2e-4, 0.0)},
    {POLICY: TrainTiming(1, 0.03, 3e-4, 0.02, 0.0)},
    {"generate": WeightsTiming(0.004, 0.006, 0.002)},
    hop_s=0.008,
    step_s=0.01,
)
"""What the runs of this file are made with, unless a test says otherwise."""
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}


def recipe(folder: Path, *overrides: str) -> RunConfig:
    """Return the config of a small run; its model has no weights."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    path = folder / "recipe.yaml"
    path.write_text(
        f"model: {{path: {model}}}\n"
        "data: {train: rows.jsonl}\n"
        "algorithm: {name: grpo, group_size: 4}\n"
        "rewards: [{kind: exact}]\n"
        "pipeline: {groups_per_step: 8, micro_batch_tokens: 256, max_staleness: 1}\n"
        "generator: {max_new_tokens: 31, max_concurrent_rollouts: 64}\n"
    )
    return load_config(path, overrides)


def play(
    config: RunConfig, timings: StageTimings = TRUE, *, steps: int = 16, seed: int = 0
) -> SimulationResult:
    """Simulate a run of this config with these timings."""
    workload = Workload(
        config.pipeline.groups_per_step,
        config.algorithm.group_size,
        7,
        LENGTHS,
        config.algorithm_settings.epochs,
        config.algorithm_settings.mini_batches,
        config.pipeline.micro_batch_tokens,
        config.algorithm_settings.scope == "step",
    )
    placement = build_run_placement(config, ["policy", "critic"])
    return run_simulation(
        config.dataflow,
        placement,
        timings,
        workload,
        steps=steps,
        seed=seed,
    )


def write_run(
    run_dir: Path,
    config: RunConfig,
    simulated: SimulationResult,
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write the run directory of a simulation; `metrics` are further ones of its steps."""
    run_dir.mkdir(parents=True, exist_ok=True)
    steps = len(simulated.step_ends)
    config = replace(config, run=replace(config.run, steps=steps))
    (run_dir / "config.yaml").write_text(dump_config(config))
    now = EPOCH_S
    rows, trace = JsonlSink(run_dir, clock=lambda: now), TraceSink(run_dir)
    sinks: list[MetricsSink] = [rows, trace]
    for sink in sinks:
        sink.start(asdict(config))
    machine: dict[str, str | int] = {
        "on_gpu": False,
        "nodes": 1,
        "cores": 2,
        "placement": config.placement.mode,
    }
    rows.log_event("machine", machine)
    trace.write_spans(
        replace(
            span,
            process=_process(span.process),
            start_s=span.start_s + EPOCH_S,
            end_s=span.end_s + EPOCH_S,
        )
        for span in simulated.spans
    )
    for index, (row, end_s) in enumerate(
        zip(make_rows(simulated), simulated.step_ends, strict=True)
    ):
        now = EPOCH_S + end_s
        measured = {**(metrics or {}), "weights/pause_s": TRUE.weights["generate"].pause_s}
        for sink in sinks:
            sink.log_step(index + 1, {**row, **measured})
    for sink in sinks:
        sink.close({})
    asyncio.run(_keep_books(run_dir, config, simulated))
    return run_dir


def make_rows(simulated: SimulationResult) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step that the planner reads of a run."""
    idle = {f"idle/{stage}": fraction for stage, fraction in simulated.idle_fractions.items()}
    depths = {f"queue/depth/{name}": mean for name, mean in simulated.queue_depths.items()}
    starts = [0.0, *simulated.step_ends]
    for outcome, start, end in zip(simulated.outcomes, starts, simulated.step_ends, strict=False):
        yield {
            "time/step_s": end - start,
            "staleness/mean": simulated.staleness_mean,
            "ledger/filtered": outcome.ledger_counts.filtered,
            "ledger/trained": outcome.ledger_counts.trained,
            **depths,
            **idle,
        }


def _process(role: str) -> str:
    """Return the process name in a real run: rank 0 for a trained model."""
    return {"policy": "trainer-0", "critic": "critic-0"}.get(role, role)


async def _keep_books(run_dir: Path, config: RunConfig, simulated: SimulationResult) -> None:
    """Write the run log; without filter and drops, prompts are admitted in order."""
    per_step, lead = config.pipeline.groups_per_step, config.pipeline.max_steps_ahead
    journal = Journal(get_journal_dir(run_dir, RUN_LOG_FOLDER), JournalConfig())
    admitted = 0
    for version, (outcome, end_s) in enumerate(
        zip(simulated.outcomes, simulated.step_ends, strict=True)
    ):
        limit = min((version + lead + 1) * per_step, len(simulated.step_ends) * per_step)
        begin_s = simulated.step_ends[version - 1] if version else 0.0
        uids = [f"0:{index}:0" for index in range(admitted, limit)]
        admitted = limit
        entry = {"time": EPOCH_S + begin_s, "version": version}
        await journal.append([JournalRecord({"kind": "admit", "uids": uids, **entry})])
        step = TrainedStep(version, tuple(outcome.groups), {}).to_record()
        await journal.append([JournalRecord({**step.meta, "time": EPOCH_S + end_s}, step.payload)])
    await journal.close()
