"""Damage of a run on disk: refused in one line before anything starts, or without any effect.

The run is that of `tests/e2e/run_of_november_2026.tar.gz`: PPO, a checkpoint at step 4, and the
journals of steps 5 and 6. Its checkpoint is sealed anew in today's format.
"""

import json
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.buffer import StageSchema
from streamrl.buffer.durable_shard import recover_state
from streamrl.buffer.group import make_admit_record
from streamrl.buffer.journal import (
    CorruptRecord,
    JournalRecord,
    get_segment_path,
    list_segments,
    read_segment,
    write_segment,
)
from streamrl.cli.main import main
from streamrl.config.preflight import PreparedRun, prepare_run
from streamrl.config.resume_checks import check_resume, load_run_log
from streamrl.config.run_config import RunConfig, load_config
from streamrl.data.prompt_stream import PromptStream
from streamrl.errors import ConfigError
from streamrl.files.file_proofs import list_files, prove_files
from streamrl.run_dir.checkpoint import (
    RUN_LOG_FOLDER,
    ResumePoint,
    check_model_dir,
    find_resume_point,
    get_journal_dir,
)
from streamrl.run_dir.run_lock import LOCK_FILE
from tests.hostile_pickle import Hostile
from tests.sealed import seal

ARCHIVE = Path(__file__).parents[1] / "e2e" / "run_of_november_2026.tar.gz"
STEP = "checkpoints/step_000004"
NUM_FLIPS = 200


class StoppedRun:
    """Run on disk, with all that a resume loads besides it."""

    def __init__(self, folder: Path) -> None:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        self.path = folder / "run"
        (self.path / LOCK_FILE).write_text("")  # free without a wait for its owner's heartbeat
        config = self.path / "config.yaml"
        config.write_text(config.read_text().replace("FOLDER", str(folder)))
        seal(self.path / STEP)
        self.config: RunConfig = load_config(config)
        self.prepared: PreparedRun = prepare_run(self.config)

    def check(self, path: str = "") -> ResumePoint:
        """Check a resume, as the command does before it starts anything."""
        resume = find_resume_point(self.path / path)
        prompts: PromptStream = self.prepared.prompts
        if resume.checkpoint is not None:
            prompts.load_state_dict(resume.checkpoint.state["prompts"])
        check_resume(resume, resume.read_layout(shards=2), self.config, prompts)
        return resume

    def recover(self) -> tuple[object, list[CorruptRecord]]:
        """Return all that a resume takes from the journals, and the damage that it reports."""
        resume = self.check()
        assert resume.checkpoint is not None
        log = load_run_log(self.path, resume.checkpoint.state)
        calls = self.config.dataflow.queue_calls
        schemas = {call.stage: StageSchema(call.needs, call.produces) for call in calls}
        groups: dict[str, str] = {}
        damage: list[CorruptRecord] = []
        for name in resume.read_layout(shards=2).shard_names:
            journal = get_journal_dir(self.path, name)
            state, corrupt = recover_state(schemas, journal, resume.find_snapshot(name))
            groups |= {uid: repr(group) for uid, group in state.groups.items()}
            damage += corrupt
        return (log.ledger.state_dict(), log.steps_to_replay, groups), damage


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> StoppedRun:
    return StoppedRun(tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def damaged(stopped: StoppedRun, tmp_path: Path) -> StoppedRun:
    """The run, of which a test may damage its copy."""
    copied = object.__new__(StoppedRun)
    vars(copied).update(vars(stopped), path=tmp_path / "run")
    shutil.copytree(stopped.path, copied.path)
    return copied


def refuse(run: StoppedRun, path: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        run.check(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_flipped_bit_of_a_durable_file_changes_what_a_resume_takes(stopped: StoppedRun):
    """A bit is found, or lies before the checkpoint, or its record is reported and made again."""
    content, no_damage = stopped.recover()
    assert not no_damage
    files = [*list_files(stopped.path / STEP), *list_files(stopped.path / "journal")]
    files = [path for path in files if path.stat().st_size]
    chance, refused = random.Random(0), 0
    for i in range(NUM_FLIPS):
        path = files[i % len(files)]
        intact = path.read_bytes()
        position, bit = chance.randrange(len(intact)), chance.randrange(8)
        flipped = bytearray(intact)
        flipped[position] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            now, damage = stopped.recover()
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            where = f"{path.relative_to(stopped.path)}, byte {position}, bit {bit}"
            assert path.is_relative_to(stopped.path / "journal"), where
            assert damage or now == content, where
        finally:
            path.write_bytes(intact)
    assert refused > NUM_FLIPS / 2


def test_a_trained_group_whose_step_must_be_repeated_has_all_columns(stopped: StoppedRun):
    resume = stopped.check()
    assert resume.checkpoint is not None
    steps = load_run_log(stopped.path, resume.checkpoint.state).steps_to_replay.values()
    trained, refused = {group.uid for step in steps for group in step.groups}, set()
    for path in (stopped.path / "journal").glob("shard-*/*.journal"):
        intact = path.read_bytes()
        for item in read_segment(path):
            assert not isinstance(item, CorruptRecord)
            position, record = item
            uid = record.meta.get("uid")
            if record.meta["kind"] == "put" and uid in trained:
                flipped = bytearray(intact)
                flipped[position.offset + position.size // 2] ^= 1
                path.write_bytes(flipped)
                assert f"of its group {uid}; resume from an older" in refuse(stopped)
                path.write_bytes(intact)
                refused.add(uid)
    assert refused


def _segment(run_dir: Path, after_last: int = 0) -> Path:
    """Return the path of the run log's last segment, or of one so many numbers after it."""
    folder = get_journal_dir(run_dir, RUN_LOG_FOLDER)
    return get_segment_path(folder, list_segments(folder)[-1] + after_last)


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def _write_hostile_prompt(run_dir: Path) -> None:
    folder = get_journal_dir(run_dir, "shard-0")
    record = make_admit_record("0:99:0", pickle.dumps(Hostile(run_dir.with_name("harmed"))), 0)
    write_segment(get_segment_path(folder, list_segments(folder)[-1] + 1), [record])


def _write_foreign_record(run_dir: Path) -> None:
    path = get_segment_path(get_journal_dir(run_dir, RUN_LOG_FOLDER), 2)
    write_segment(path, [JournalRecord({"kind": "open", "version": 0})])


CHECKPOINT_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "extra": (
        lambda saved: shutil.copy(
            saved / "trainer/state_00000_000.safetensors",
            saved / "trainer/state_00001_000.safetensors",
        ),
        "trainer/state_00001_000.safetensors was not written with the others",
    ),
    "truncated": (
        lambda saved: (saved / "queue/shard-0/00000000.journal").write_bytes(b"\x93srlj\n"),
        "00000000.journal has 6 bytes of",
    ),
    "edited": (
        lambda saved: (saved / "state.json").write_text(
            (saved / "state.json").read_text().replace('"trained": 16', '"trained": 17')
        ),
        "state.json: has changed since it was written",
    ),
    "sealed": (
        lambda saved: seal(
            saved,
            ledger=json.loads((saved / "state.json").read_text())["ledger"] | {"trained": 17},
        ),
        "state.json does not match",
    ),
    "deep": (lambda saved: (saved / "state.json").write_text("[" * 100_000), "state.json"),
    "progress": (lambda saved: (saved / "trainer/trainer.json").unlink(), "trainer.json"),
    "version": (lambda saved: seal(saved, version=7), "does not match the folder name"),
}
RUN_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "metrics": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n'),
        "metrics.jsonl:2",
    ),
    "rows": (
        lambda run: _append(run / "metrics.jsonl", '{"step": 6, "time": 1, "a/hist": {}}\n'),
        "a/hist={}: neither a number nor a histogram",
    ),
    "no step": (
        lambda run: _append(run / "metrics.jsonl", '{"step": null, "time": 1}\n'),
        "must be a JSON object with time and integer step",
    ),
    "time": (
        lambda run: _append(run / "events.jsonl", '{"event": "died"}\n'),
        "must be a JSON object with time and event",
    ),
    "hostile": (_write_hostile_prompt, "a prompt in the journal cannot be read"),
    "history": (_write_foreign_record, "run.name=NEW the checkpoint alone is resumed"),
    "gap": (lambda run: _segment(run).rename(_segment(run, 9_999_999)), "is missing"),
    "lost": (lambda run: shutil.rmtree(run / "checkpoints"), "start a run with another name"),
    "trace": (lambda run: (run / "trace.json").write_text("[" * 100_000), "trace.json: "),
    "link": (lambda run: (run / "trace.partial").symlink_to("/nowhere"), "trace.partial is a link"),
    "pipe": (lambda run: os.mkfifo(_segment(run, 1)), "not a regular file"),
}


def prove(run_dir: Path) -> object:
    return prove_files([path for path in list_files(run_dir) if path.is_file()])


@pytest.mark.parametrize("kind", [*CHECKPOINT_DAMAGE, *RUN_DAMAGE])
def test_a_damaged_run_directory_is_refused_and_stays_unchanged(damaged: StoppedRun, kind: str):
    damage, part = (CHECKPOINT_DAMAGE | RUN_DAMAGE)[kind]
    damage(damaged.path / STEP if kind in CHECKPOINT_DAMAGE else damaged.path)
    before = prove(damaged.path)
    assert part in refuse(damaged)
    assert prove(damaged.path) == before
    assert not damaged.path.with_name("harmed").exists()


@pytest.mark.parametrize("kind", ["metrics", "hostile"])
def test_the_command_refuses_a_damaged_run_and_changes_no_file(
    damaged: StoppedRun, kind: str, capsys: pytest.CaptureFixture[str]
):
    damage, part = RUN_DAMAGE[kind]
    damage(damaged.path)
    before = prove(damaged.path)
    assert main(["train", "--resume", str(damaged.path), "run.steps=99"]) == 2
    assert part in capsys.readouterr().err
    assert prove(damaged.path) == before


def test_a_broken_checkpoint_beside_a_whole_one_names_both(damaged: StoppedRun):
    newer = damaged.path / "checkpoints/step_000099"
    shutil.copytree(damaged.path / STEP, newer)
    hint = f"remove step_000099, then --resume {damaged.path}"
    error = refuse(damaged)
    assert "version 4 does not match the folder name step_000099; step_000004 is whole" in error
    assert error.endswith(hint)
    seal(newer, version=99)
    (newer / "model/tokenizer.json").write_text("{}")
    error = refuse(damaged)
    assert "step_000099: model/tokenizer.json has" in error and error.endswith(hint)
    shutil.rmtree(newer)
    assert damaged.check().version == 4

    segment = get_segment_path(get_journal_dir(damaged.path, "shard-0"), 3)
    segment.rename(segment.with_name("00000009.journal"))  # as a later checkpoint leaves it
    shutil.copytree(damaged.path / STEP, newer)
    whole = damaged.path / STEP
    assert refuse(damaged).endswith(f"--resume {whole} goes on there and loses later steps")
    assert refuse(damaged, "checkpoints/step_000099").endswith("loses later steps")


def test_a_model_of_a_checkpoint_is_checked_wherever_it_is_used(damaged: StoppedRun):
    policy, critic = (damaged.path / STEP / name for name in ("model", "critic/model"))
    for model in (policy, critic):
        check_model_dir(model, "model.path=")
        (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text()[::-1])
        with pytest.raises(ConfigError, match=r"^model\.path=.*/tokenizer\.json has changed"):
            check_model_dir(model, "model.path=")
    shutil.copytree(policy, damaged.path / "model")
    check_model_dir(damaged.path / "model", "model.path=")
    damaged.config.model.path, path = str(policy), damaged.config.model.path
    with pytest.raises(ConfigError, match=r"^model\.path=.*/tokenizer\.json has changed"):
        prepare_run(damaged.config)
    (damaged.path / STEP / "state.json").unlink()  # a checkpoint without an index has no proof
    with pytest.raises(ConfigError, match=r"^model\.path=.*state\.json"):
        check_model_dir(policy, "model.path=")
    damaged.config.model.path = path


def test_a_checkpoint_of_an_earlier_version_is_checked_by_size(damaged: StoppedRun):
    state = damaged.path / STEP / "state.json"
    fields = json.loads(state.read_text())
    sizes = {name: size for name, (size, _) in fields["files"].items()}
    state.write_text(json.dumps({**fields, "format": 3, "files": sizes}))
    assert damaged.check().version == 4
    (damaged.path / STEP / "model/config.json").write_text("{}")
    assert "model/config.json has 2 bytes of 751" in refuse(damaged)
