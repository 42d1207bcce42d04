"""Mutants: faults put into the package on purpose, each with the test that must fail for it.

    python -m tests.mutants [--only TEXT] [--check]

runs, in a copy of the working tree, each mutant's test without the fault (it must pass) and with it
(it must fail). Prints a line per mutant; exits with 1 if a mutant survives. `--check` only compares
the texts with the sources and the tests, as the quick tests do.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A fault: `new` in place of `old`, which occurs once in `file` of the package."""

    file: str
    old: str
    new: str
    test: str
    """Arguments of pytest, such as a node id below tests/."""


MUTANTS: tuple[Mutant, ...] = (
    # algorithms
    Mutant(
        "algorithms/math/tokens.py",
        "return _ratio_minus_one(-x) + x",
        "return (-x).exp() - 1 + x",
        "tests/algorithms/math/test_kl.py",
    ),
    Mutant(
        "algorithms/math/losses.py",
        "loss = torch.maximum(-advantages * r, clipped)",
        "loss = torch.minimum(-advantages * r, clipped)",
        "tests/algorithms/math/test_losses.py",
    ),
    Mutant(
        "algorithms/math/advantages.py",
        "next_value = torch.where(is_counted, estimates[:, t], next_value)",
        "next_value = estimates[:, t]",
        "tests/algorithms/math/test_token_advantages.py",
    ),
    Mutant(
        "algorithms/math/correction.py",
        "weight = staleness / (staleness + 1)",
        "weight = 1 / (staleness + 1)",
        "tests/algorithms/math/test_correction.py",
    ),
    Mutant(
        "algorithms/objective.py",
        '"num_tokens": mask.sum(),',
        '"num_tokens": kept.sum(),',
        "tests/algorithms/test_objective.py",
    ),
    # buffer
    Mutant(
        "buffer/staleness_credits.py",
        "return (depth + version + 1) * groups_per_step",
        "return (depth + version + 2) * groups_per_step",
        "tests/buffer/test_staleness_credits.py",
    ),
    Mutant(
        "buffer/step_assembler.py",
        "if staleness > self._max_staleness:",
        "if staleness > self._max_staleness + 1:",
        "tests/buffer/test_step_assembler.py",
    ),
    Mutant(
        "buffer/shard.py",
        "if active.expires_at > now:  # renewed",
        "if active.expires_at > math.inf:  # renewed",
        "tests/buffer/test_leases.py",
    ),
    Mutant(
        "buffer/shard.py",
        "if _start_commit(self._state, commit, self._state.find_leased_group(commit.lease))",
        "if _start_commit(self._state, commit, self._state.groups.get(commit.uid))",
        "tests/buffer/test_commits.py",
    ),
    Mutant(
        "buffer/journal.py",
        "self._can_sync = False\n        os.fsync",
        "os.fsync",
        "tests/buffer/test_journal.py",
    ),
    Mutant(
        "buffer/journal.py",
        "if check != _compute_body_checksum(fields, meta, (payload,), offset):",
        "if not check:",
        "tests/buffer/test_journal.py",
    ),
    Mutant(
        "buffer/run_log.py",
        "if lost or unknown:",
        "if lost:",
        "tests/buffer/test_run_log.py",
    ),
    # stream
    Mutant(
        "stream/device_lease.py",
        "for other in (*self._grants, *blocked)",
        "for other in self._grants",
        "tests/stream/test_device_lease.py",
    ),
    Mutant(
        "stream/run_state.py",
        "        self.has_partial_update = True\n",
        "",
        "tests/stream/test_train_step.py",
    ),
    Mutant(
        "stream/stage_worker.py",
        "in_flight.abandon_lease(lease)",
        "pass",
        "tests/stream/test_stage_worker.py",
    ),
    Mutant(
        "pipeline.py",
        "        await served.wait_for_version(find_newest_version(columns))\n",
        "",
        "tests/test_pipeline.py -k unverified",
    ),
    # weights
    Mutant(
        "weights/buckets.py",
        "if checksum == bucket.checksum:",
        "if checksum:",
        "tests/weights/test_buckets.py",
    ),
    Mutant(
        "weights/versions.py",
        "if not (mean <= limit and quantile <= QUANTILE_FACTOR * limit):",
        "if mean > limit or quantile > QUANTILE_FACTOR * limit:",
        "tests/weights/test_versions.py -k first_token",
    ),
    Mutant(
        "weights/transports/shared_memory.py",
        "if header != (handle.version, handle.bucket):",
        "if not header:",
        "tests/weights/transports/test_shared_memory.py",
    ),
    Mutant(
        "weights/transports/collective.py",
        "if received != header:",
        "if not received:",
        "tests/weights/transports/test_collective.py -k header",
    ),
    Mutant(
        "weights/transports/collective.py",
        "is_copy_needed = is_again or not (has_reached_all",
        "is_copy_needed = not (has_reached_all",
        "tests/weights/transports/test_collective.py -k published_again",
    ),
    # engines
    Mutant(
        "engines/generation/generation_engine.py",
        "was_last = self._reasons == {reason}",
        "was_last = reason in self._reasons",
        "tests/engines/generation/test_requests_in_flight.py",
    ),
    Mutant(
        "engines/generation/generation_engine.py",
        "awaited = counts if is_queued else own",
        "awaited = own",
        "tests/engines/generation/test_sampling_progress.py",
    ),
    Mutant(
        "engines/vllm/load_check.py",
        "{*published, *unmatched} if unmatched else set()",
        "{*published, *unmatched}",
        "tests/engines/vllm/test_load_check.py",
    ),
    Mutant(
        "engines/vllm/weight_loader.py",
        "self._own_tensor, self._viewed_tensors = block, None, parts",
        "self._own_tensor, self._viewed_tensors = block, block, parts",
        "tests/engines/vllm/test_weight_loader.py",
    ),
    Mutant(
        "engines/training/collate.py",
        "end = int(lengths[: index + 1].sum())",
        "end = int(lengths[:index].sum())",
        "tests/engines/training/test_collate.py",
    ),
    Mutant(
        "engines/training/optimizer_offload.py",
        "                and tensor.numel()\n",
        "",
        "tests/engines/training/test_optimizer_offload.py",
    ),
    Mutant(
        "engines/training/model_trainer.py",
        "with self._allow_slow_ranks(SAVE_TIMEOUT_S), keep_heap_compact():",
        "with keep_heap_compact():",
        "tests/engines/training/test_model_trainer.py -k save_for_longer",
    ),
    Mutant(
        "engines/training/model_trainer.py",
        "buffers[name], shards[name] = tensor.to(self._dtypes[name]), shard",
        "buffers[name], shards[name] = tensor, shard",
        "tests/engines/vllm/test_rank_groups.py -k casts_shards",
    ),
    Mutant(
        "engines/models/packed_rows.py",
        "return seen.triu(1 - sliding_window)[None, None]",
        "return seen.triu(-sliding_window)[None, None]",
        "tests/engines/models/test_packed_rows.py::test_every_family_has_the_scores_and_gradients_of_padded_rows[mistral]",
    ),
    # resharding
    Mutant(
        "resharding/executors.py",
        "> bucket_bytes\n            ):",
        "> 2 * bucket_bytes\n            ):",
        "tests/resharding/test_transfer_rounds.py",
    ),
    Mutant(
        "resharding/plans.py",
        "if sender != rank:\n                sent[sender] +=",
        "if sender == rank:\n                sent[sender] +=",
        "tests/resharding/test_plans.py",
    ),
    Mutant(
        "resharding/layouts.py",
        "start, stop = index * size, min((index + 1) * size, self.shape[dim])",
        "start, stop = index * size, (index + 1) * size",
        "tests/resharding/test_layouts.py",
    ),
    # actors
    Mutant(
        "actors/liveness.py",
        "min(now - self._polled_at_s, MAX_POLL_GAP_S)",
        "now - self._polled_at_s",
        "tests/actors/test_liveness.py -k pause_of_the_monitor",
    ),
    Mutant(
        "actors/launch/driver.py",
        "self._clock() + left_s + STOP_TIMEOUT_S",
        "self._clock() + STOP_TIMEOUT_S",
        "tests/actors/launch/test_driver.py -k stop",
    ),
    Mutant(
        "actors/launch/elastic.py",
        "name for name, deadline in self._deadlines.values() if now > deadline",
        "name for name, deadline in self._deadlines.values() if now < deadline",
        "tests/actors/launch/test_elastic.py -k own_deadline",
    ),
    Mutant(
        "actors/launch/elastic.py",
        "if now > pending.deadline:",
        "if now > 2 * pending.deadline:",
        "tests/actors/launch/test_elastic.py -k never_serves",
    ),
    Mutant(
        "actors/transport/rpc.py",
        'if not hmac.compare_digest(proof, _compute_proof(secret, b"caller", challenges)):',
        "if not proof:",
        "tests/actors/transport/test_rpc.py -k without_the_secret",
    ),
    Mutant(
        "actors/transport/rpc.py",
        '_compute_proof(secret, b"caller", challenges))\n    proof',
        '_compute_proof(secret, b"caller", bytes(64)))\n    proof',
        "tests/actors/transport/test_rpc.py -k replayed",
    ),
    Mutant(
        "actors/transport/ray_calls.py",
        "key=lambda error: isinstance(error, RankLostError)",
        "key=lambda error: not isinstance(error, RankLostError)",
        "tests/actors/transport/test_ray_calls.py -k dead_rank",
    ),
    Mutant(
        "actors/shared_weights.py",
        "if version != self._version:",
        "if version < self._version:",
        "tests/actors/test_shared_weights.py -k superseded",
    ),
    Mutant(
        "actors/trainer.py",
        "if self._has_reference and version > self._reference_version:",
        "if self._has_reference:",
        "tests/actors/test_trainer_actor.py -k reference",
    ),
    Mutant(
        "actors/coordination/run_persistence.py",
        "            await asyncio.to_thread(writer.discard)\n",
        "",
        "tests/actors/coordination/test_run_persistence.py -k partial_files",
    ),
    Mutant(
        "actors/coordination/trainer_group.py",
        "rank_sums[:: self._trainer_config.ranks_per_batch]",
        "rank_sums",
        "tests/actors/coordination/test_trainer_group.py -k count_once",
    ),
    # run_dir, config, cli
    Mutant(
        "run_dir/checkpoint.py",
        "list_checkpoints(self._final_dir.parent)[:-keep]",
        "list_checkpoints(self._final_dir.parent)[: 1 - keep]",
        "tests/run_dir/test_checkpoint.py",
    ),
    Mutant(
        "run_dir/checkpoint.py",
        "            if old != best:\n",
        "            if old != self._final_dir:\n",
        "tests/run_dir/test_checkpoint.py",
    ),
    Mutant(
        "run_dir/run_lock.py",
        "if _read_heartbeat(folder) != before:",
        "if _read_heartbeat(folder) < before:",
        "tests/run_dir/test_run_lock.py",
    ),
    Mutant(
        "config/run_config.py",
        "groups % algorithm.mini_batches,",
        "algorithm.mini_batches > groups,",
        "tests/config/test_run_config.py",
    ),
    Mutant(
        "config/resume_overrides.py",
        "old.specs.keys() <= new.specs.keys()",
        "True",
        "tests/config/test_resume_overrides.py",
    ),
    Mutant(
        "cli/main.py",
        "_print_error(str(error), EXIT_BAD_INPUT)",
        "_print_error(str(error), EXIT_FAILED)",
        "tests/cli/test_bad_input.py -k bad_command_line",
    ),
    # user_code, rewards
    Mutant(
        "user_code/pool/process.py",
        "if (module, name) not in _ALLOWED_CLASSES",
        "if not module.startswith('streamrl.')",
        "tests/user_code/pool/test_pool.py -k unpickling",
    ),
    Mutant(
        "user_code/pool/reaper.py",
        "    channel.close()\n    kill_descendants()",
        "    channel.close()",
        "tests/user_code/pool/test_pool.py -k child_processes",
    ),
    Mutant(
        "user_code/pool/proc_stats.py",
        "pending += children.get(pid, ())",
        "pending += ()",
        "tests/environments/hosts/test_host_pool.py -k memory_limit",
    ),
    Mutant(
        "user_code/pool/pool.py",
        "raise (SharedWorkerError(str(error)) if worker.was_shared else error) from None",
        "raise error from None",
        "tests/user_code/pool/test_pool.py -k shared_worker_fails",
    ),
    Mutant(
        "user_code/pool/pool.py",
        "return not (is_taken or process.is_held_up or process.has_ended)",
        "return not (is_taken or process.has_ended)",
        "tests/environments/hosts/test_host_pool.py -k hanging_call_times_out",
    ),
    Mutant(
        "user_code/sandbox/jail.py",
        '"--unshare-pid", "--unshare-net", "--unshare-uts"',
        '"--unshare-pid", "--unshare-uts"',
        "tests/user_code/sandbox/test_sandbox.py -k namespaces",
    ),
    Mutant(
        "user_code/sandbox/jail_driver.py",
        "        reset_workspace(program, compiled_files)\n        if",
        "        if",
        "tests/user_code/sandbox/test_sandbox.py -k clean_workspace",
    ),
    Mutant(
        "user_code/sandbox/sandbox.py",
        "return expected is actual",
        "return expected == actual",
        "tests/user_code/sandbox/test_compare.py",
    ),
    Mutant(
        "user_code/service_gate.py",
        "if num_lone == MAX_LONE_FAILURES",
        "if num_lone == 1",
        "tests/rewards/kinds/test_judge.py -k breaks_the_server",
    ),
    Mutant(
        "rewards/reward_set.py",
        "return np.where(passes_gates, total, 0.0)",
        "return total",
        "tests/rewards/test_reward_set.py -k gate",
    ),
    Mutant(
        "rewards/group_filter.py",
        "if len(scores) == 1 or not has_equal_scores(scores.min(), scores.max()):",
        "if not has_equal_scores(scores.min(), scores.max()):",
        "tests/rewards/test_group_filter.py -k two_or_more_rollouts",
    ),
    Mutant(
        "rewards/kinds/judge.py",
        'line.replace(self._api_key, "***") if self._api_key else line',
        "line",
        "tests/rewards/kinds/test_judge.py -k redacted",
    ),
    # environments
    Mutant(
        "environments/episodes/driver.py",
        "if failures:\n            raise failures[0]\n        return episodes",
        "if not episodes:\n            raise failures[0]\n        return episodes",
        "tests/environments/episodes/test_driver.py -k group_is_trained_only_whole",
    ),
    Mutant(
        "environments/episodes/driver.py",
        "if not np.array_equal(sampled.token_ids[:start], self.token_ids):",
        "if len(sampled.token_ids) < start:",
        "tests/environments/episodes/test_driver.py -k does_not_continue_the_episode",
    ),
    Mutant(
        "environments/episodes/driver.py",
        "if granted.done() and not granted.cancelled():",
        "if granted.cancelled():",
        "tests/environments/episodes/test_decode_slots.py",
    ),
    Mutant(
        "environments/rendering/turn_renderer.py",
        "is_closed = last in self.end_token_ids or last == bridge.token_ids[closing]",
        "is_closed = last == bridge.token_ids[closing]",
        "tests/environments/rendering/test_turn_renderer.py -k generation_config",
    ),
    Mutant(
        "environments/tool_calls/marked_turn.py",
        "return self.text.rfind(code) + 1 if code else 0",
        "return 0",
        "tests/environments/tool_calls/test_call_formats.py -k format_of_a_family",
    ),
    # data, telemetry
    Mutant(
        "data/guarded_text.py",
        'if key == "role" and str(value).isidentifier()',
        'if key == "role"',
        "tests/data/test_guarded_text.py -k role",
    ),
    Mutant(
        "data/prompt_stream.py",
        "if state[name] != now:",
        'if name != "fingerprint" and state[name] != now:',
        "tests/data/test_prompt_stream.py -k other_data",
    ),
    Mutant(
        "data/prompt_stream.py",
        "np.random.SeedSequence([seed, epoch, part])",
        "np.random.SeedSequence([seed, part])",
        "tests/data/test_prompt_stream.py -k order_is_fixed",
    ),
    Mutant(
        "telemetry/sinks.py",
        'if r["step"] < step',
        'if r["step"] <= step',
        "tests/telemetry/test_sinks.py",
    ),
    Mutant(
        "telemetry/page/page.py",
        "return host in HOST_NAMES and is_token",
        "return is_token",
        "tests/telemetry/page/test_page.py",
    ),
    # planner, placement
    Mutant(
        "planner/costs/memory.py",
        "layer_params=(cost.device_params - outside) // shape.layers,",
        "layer_params=cost.device_params // shape.layers,",
        "tests/planner/test_to_planner_problem.py -k shape_has_the_sizes",
    ),
    Mutant(
        "planner/search/planner.py",
        "if min_ahead <= placement.max_staleness <= bound",
        "if min_ahead <= placement.max_staleness",
        "tests/planner/search/test_planner.py::test_more_staleness_is_never_slower",
    ),
    Mutant(
        "planner/steady_state/list_scheduler.py",
        "return self.lag - (self.lag - step - 1) % self.step_interval",
        "return self.lag - (self.lag - step) % self.step_interval",
        "tests/planner/steady_state/test_estimator.py",
    ),
    Mutant(
        "planner/simulator/simulated_engine.py",
        "end, slot, group, start, context = self._started.pop()",
        "end, slot, group, start, context = self._started.pop(0)",
        "tests/planner/simulator/test_simulated_engine.py",
    ),
    Mutant(
        "planner/to_placement.py",
        "return (0, 3) if grid.dp_size > 1 else (0,)",
        "return (1, 3) if grid.dp_size > 1 else (0,)",
        "tests/planner/test_to_planner_problem.py",
    ),
    Mutant(
        "placement/resource_demand.py",
        "if sum(needs) > available:",
        "if sum(needs) >= available:",
        "tests/config/test_preflight.py",
    ),
    Mutant(
        "placement/pools.py",
        "first = math.floor(begins[unit] * size)",
        "first = 0",
        "tests/placement/test_pools.py",
    ),
)


def find_stale(mutants: tuple[Mutant, ...]) -> Iterator[str]:
    """Yield a line per mutant whose text is not in its file exactly once, or that has no test."""
    for mutant in mutants:
        count = _read(f"streamrl/{mutant.file}").count(mutant.old)
        if count != 1:
            yield f"{mutant.file}: {count} times {mutant.old!r}"
        node, _, word = mutant.test.partition(" -k ")
        file, _, name = node.partition("::")
        function = name.partition("[")[0] or rf"test_\w*{word}\w*"
        if not re.search(rf"def {function}\(", _read(file)):
            yield f"{mutant.file}: no test {mutant.test}"


def _read(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.is_file() else ""


def copy_tree(target: Path) -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def passes(tree: Path, test: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
    try:
        ended = subprocess.run(command, cwd=tree, capture_output=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        return False
    return not ended.returncode


def survives(tree: Path, mutant: Mutant) -> bool:
    file = tree / "streamrl" / mutant.file
    source = file.read_text()
    file.write_text(source.replace(mutant.old, mutant.new))
    try:
        return passes(tree, mutant.test)
    finally:
        file.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mutants with this text in file or test")
    parser.add_argument("--check", action="store_true", help="compare texts, run nothing")
    arguments = parser.parse_args()
    stale = list(find_stale(MUTANTS))
    print(*stale, sep="\n", end="\n" if stale else "")
    if arguments.check or stale:
        return bool(stale)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        passes_without = cache(passes)
        for mutant in MUTANTS:
            if arguments.only in f"{mutant.file} {mutant.test}":
                if not passes_without(tree, mutant.test):
                    verdict = "FAILS WITHOUT"
                else:
                    verdict = "SURVIVES" if survives(tree, mutant) else "caught"
                survivors += verdict != "caught"
                print(f"{verdict}: {mutant.file}: {mutant.test}", flush=True)
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
