"""Only sampled tokens of an episode are trained, and a mask that says otherwise is refused."""

import numpy as np
import pytest

from streamrl.buffer import ExperienceQueue, QueueConfig, ShardCapacity, StageSchema
from streamrl.environments.interface import EnvironmentStep
from streamrl.errors import ContractError
from streamrl.messages import EPISODE_COLUMNS, ROLLOUT_COLUMNS, TokenSource, check_loss_mask
from streamrl.planner.simulator.virtual_loop import run_virtual
from tests.environments.episodes.scripted import (
    PROMPT,
    ScriptedHosts,
    ScriptedSampler,
    ScriptedSession,
    make_driver,
    run_group,
    say,
)
from tests.fake_shards import LocalShard, MemoryLog
from tests.virtual_time import in_virtual_time

STAGES = {
    "generate": StageSchema((), (*ROLLOUT_COLUMNS, *EPISODE_COLUMNS)),
    "train": StageSchema(ROLLOUT_COLUMNS, ()),
}


@pytest.fixture(scope="module")
def columns():
    """Columns of two episodes of two turns, `?ab;[word]ab;` with different words."""
    words = iter(("left", "right"))

    def open_session():
        return ScriptedSession([say(next(words)), EnvironmentStep(done=True)])

    sampler = ScriptedSampler(lambda context, seed: "ab;")
    driver = make_driver(sampler, ScriptedHosts(open_session))
    return run_virtual(run_group(driver, seeds=(0, 1)))


def unmask_one(columns, source):
    """Return the columns with loss_mask true for the first token of another source."""
    loss_mask = columns["loss_mask"].copy()
    loss_mask[np.flatnonzero(columns["token_source"] == source)[0]] = True
    # A version, as a mask and versions that were wrong together would have.
    versions = np.where(loss_mask & (columns["policy_version"] < 0), 0, columns["policy_version"])
    return {**columns, "loss_mask": loss_mask, "policy_version": versions}


@pytest.mark.parametrize(
    "source", [source for source in TokenSource if source is not TokenSource.SAMPLED]
)
@in_virtual_time
async def test_the_queue_refuses_a_loss_mask_beyond_the_sampled_tokens(columns, source):
    queue = ExperienceQueue(
        [LocalShard(STAGES, QueueConfig(shards=1), ShardCapacity(4), log=MemoryLog())], "me"
    )
    await queue.insert_prompts([PROMPT], 0)
    (group,) = await queue.lease_groups("generate", max_groups=1, columns=(), wait_s=1)
    with pytest.raises(
        ContractError, match=rf"loss_mask: true for token \d+ .*token_source is {source.name}$"
    ):
        await queue.commit_columns([(group.lease, unmask_one(columns, source))])
    assert await queue.commit_columns([(group.lease, columns)]) == []


def test_a_sampled_token_may_be_masked(columns):
    check_loss_mask({**columns, "loss_mask": np.zeros_like(columns["loss_mask"])})
