"""Surroundings of an own loop: devices, worker groups, prompts and checkpoints.

with start_loop(load_config(Path("ppo.yaml")), workers=2) as loop:
    policy = loop.start_group(PolicyWorker)
    loop.load_checkpoint()
    for batch in loop.batches:
        ...
        if loop.is_checkpoint_due:
            loop.save_checkpoint()
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from streamrl.actors.launch.actor_registry import make_hybrid_env
from streamrl.actors.launch.fork_server import start_fork_server
from streamrl.actors.launch.ray_cluster import connect_cluster
from streamrl.config.preflight import PreparedRun, prepare_run
from streamrl.config.run_config import RunConfig
from streamrl.dataflow import REFERENCE_CALL, SERVING_ROLES
from streamrl.errors import CheckpointError, ConfigError, StreamError
from streamrl.files.atomic_write import wrap_os_errors
from streamrl.files.typed_settings import check_conflicts, get_setting
from streamrl.own_loops import BatchRef, WorkerMesh
from streamrl.own_loops.model_workers import (
    SavedRank,
    ScorerWorker,
    TrainedWorker,
    make_loop_config,
)
from streamrl.own_loops.worker_group import ResourcePool, WorkerGroup, WorkerGroupReply, put
from streamrl.resharding.grids import RankGrid
from streamrl.run_dir.checkpoint import (
    CheckpointState,
    CheckpointWriter,
    ResumePoint,
    check_files,
    list_checkpoints,
    read_checkpoint,
)
from streamrl.run_dir.run_config_file import CONFIG_FILE
from streamrl.run_dir.run_lock import RunLock, acquire_run_lock

MAX_GROUPS = 8
"""Worker groups that may share the slots of a loop."""


@dataclass
class OwnLoop:
    """Devices, prompts and worker groups of an own loop, and its position.

    pool: a slot per data-parallel worker.
    prepared: checked data of the config; `max_length` is the maximum tokens of prompt and
        completion together.
    step: number of the current training step, from 1; before the first batch, of the last one that
        is in the checkpoint, or 0.
    """

    config: RunConfig
    pool: ResourcePool
    prepared: PreparedRun
    on_gpu: bool = False
    groups: list[WorkerGroup] = field(default_factory=list)
    step: int = 0
    _run_lock: RunLock | None = None

    def start_group(
        self,
        worker: type,
        *arguments: object,
        ranks: int | None = None,
        offloads: bool = False,
    ) -> WorkerGroup:
        """Start workers of a class in the first `ranks` slots; by default in every slot.

        Workers get config, max_length and then `arguments`. Training ranks are tensor parallel as
        `tensor_parallel` of trainer or critic.trainer says; each rank generates alone. `offloads`
        is that of WorkerGroup.
        """
        ranks, tp_size = ranks or self.pool.slots, 1
        if issubclass(worker, TrainedWorker):
            tp_size = self.config.get_trainer_config(worker.configured_as).tensor_parallel
        mesh = WorkerMesh(
            RankGrid(1, tp_size, ranks // tp_size).assign_ranks(),
            RankGrid(1, 1, ranks).assign_ranks(),
        )
        settings = (self.config, self.prepared.max_length, *arguments)
        env = make_hybrid_env(self.config, on_gpu=self.on_gpu)
        group = WorkerGroup(self.pool, worker, *settings, mesh=mesh, env=env, offloads=offloads)
        self.groups.append(group)
        return group

    def start_reference(self, policy: WorkerGroup) -> WorkerGroup:
        """Return the group whose `score` computes the log-probabilities of the reference.

        With LoRA it is `policy` itself: the reference is the model below its adapters. Otherwise,
        or with reference.replicas=1, starts ScorerWorkers on `reference.world_size` ranks.
        """
        if REFERENCE_CALL.role in self.config.hosts:
            return policy
        ranks = self.config.reference.world_size
        return self.start_group(ScorerWorker, REFERENCE_CALL.role, ranks=ranks)

    @property
    def batches(self) -> Iterator[BatchRef | WorkerGroupReply]:
        """Prompts of each step up to run.steps, by reference; first waits for all workers."""
        for group in self.groups:
            group.wait_until_ready()
        num_prompts = self.config.pipeline.groups_per_step
        while self.step < self.config.run.steps:
            self.step += 1
            yield put({"prompt": self.prepared.prompts.draw_prompts(num_prompts)})

    @property
    def is_checkpoint_due(self) -> bool:
        """Return whether the current step ends with a checkpoint: checkpoint.every, .at_end."""
        settings, is_last = self.config.checkpoint, self.step == self.config.run.steps
        is_periodic = bool(settings.every) and self.step % settings.every == 0
        return is_periodic or (settings.at_end and is_last)

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of all trained groups and of the position in the prompts.

        Call it between two steps, after `load_checkpoint` at the start. The folder,
        `checkpoints/step_...` in run.dir/run.name, has the format of a run's checkpoint, and
        checkpoint.keep bounds their number. All nodes must share it. Returns the folder. Raises
        NoSpaceError or CheckpointError if the disk fails; earlier checkpoints stay valid.
        """
        if self._run_lock is None:
            raise ConfigError("save_checkpoint: call load_checkpoint once before the first step")
        writer = CheckpointWriter(self.config.run_dir.resolve(), self.step)
        try:
            replies = [group.save_state(writer.partial_dir) for group in self._trained_groups]
            saved: list[SavedRank] = [rank for reply in replies for rank in reply.get()]
            for rank in saved:
                writer.add_proofs(rank.proofs)
            state = CheckpointState(
                version=self.step,
                ledger={},
                prompts=self.prepared.prompts.state_dict(),
                dials={name: value for rank in saved for name, value in rank.dials.items()},
                cuts={},
                versions={rank.role: rank.version for rank in saved},
            )
            return writer.commit(state, keep=self.config.checkpoint.keep)
        except StreamError as error:
            writer.discard()
            if isinstance(error, CheckpointError):
                raise writer.rename_in_error(error) from error
            raise

    def load_checkpoint(self) -> int:
        """Continue from the newest checkpoint in run.dir/run.name; return its step, 0 without one.

        Call it once, after all groups have started and before the first batch. Models, optimizers,
        random states, adaptive parameters and the position in the prompts become those of the
        checkpoint. Raises ConfigError if another process uses the folder, or if files have changed,
        or for other data or other trained roles.
        """
        folder = self.config.run_dir.resolve()
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"{folder}: has a run of `streamrl train`; set run.dir or run.name")
        with wrap_os_errors(f"run directory {folder}", ConfigError):
            folder.mkdir(parents=True, exist_ok=True)
            self._run_lock = self._run_lock or acquire_run_lock(folder)
            ResumePoint(folder, None).discard_later()
        complete = list_checkpoints(folder / "checkpoints")
        if not complete:
            return 0
        checkpoint = read_checkpoint(complete[-1], key="")
        check_files(checkpoint, key="")
        versions = checkpoint.state.get("versions", {})
        self.prepared.prompts.load_state_dict(checkpoint.state["prompts"])
        replies = [
            group.load_state(checkpoint.path, versions, checkpoint.state["dials"])
            for group in self._trained_groups
        ]
        if unused := versions.keys() - {reply.get() for reply in replies}:
            roles = ", ".join(sorted(unused))
            raise ConfigError(f"{checkpoint.path}: has a {roles}, which this loop does not train")
        self.step = checkpoint.version
        return self.step

    @property
    def _trained_groups(self) -> list[WorkerGroup]:
        return [group for group in self.groups if hasattr(group, "save_state")]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        if self._run_lock is not None:
            self._run_lock.release()


@contextlib.contextmanager
def start_loop(
    config: RunConfig, *, workers: int, takes_turns: bool | None = None
) -> Iterator[OwnLoop]:
    """Context with a loop of `workers` slots on a local Ray or the cluster of placement.address.

    takes_turns: the groups compute one after the other; by default where they share GPUs.

    Raises ConfigError for invalid settings or data, or an unsuitable cluster.
    """
    if workers < 1:
        raise ConfigError(f"workers={workers}: must be at least 1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start_fork_server()
    for key in {facts.ranks for facts in SERVING_ROLES.values()} - {""}:
        is_larger = get_setting(config, key) > workers
        check_conflicts(config, [(is_larger, key, f"the loop has workers={workers}; start more")])
    prepared = prepare_run(make_loop_config(config, workers))
    placement = replace(config.placement, cpus=config.placement.cpus or workers)
    with connect_cluster(placement) as cluster:
        pool = ResourcePool(
            workers,
            gpus=float(cluster.has_gpus),
            groups=MAX_GROUPS,
            takes_turns=cluster.has_gpus if takes_turns is None else takes_turns,
        )
        loop = OwnLoop(config, pool, prepared, cluster.has_gpus)
        try:
            yield loop
        finally:
            loop.close()
