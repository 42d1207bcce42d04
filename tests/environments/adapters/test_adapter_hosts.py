"""Adapters in host processes: from the config to columns of a group; missing packages."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.environments.config import ADAPTER_CLASSES, EnvironmentConfig
from streamrl.environments.hosts.host_pool import EnvironmentHostPool
from streamrl.environments.hosts.user_class import load_user_class
from streamrl.errors import ConfigError
from streamrl.messages import FinishReason
from tests.environments.episodes.scripted import ScriptedSampler, make_driver, run_group

SOLUTION = ("down", "down", "right", "right", "down", "right")


async def test_a_group_plays_gymnasium_through_hosts_and_driver():
    config = EnvironmentConfig(
        kind="gymnasium",
        options={
            "id": "FrozenLake-v1",
            "make": {"is_slippery": False},
            "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
        },
        processes=1,
    )

    def write(context, seed):
        return f"{SOLUTION[context.count(';')]};"

    pool = EnvironmentHostPool(config)
    await pool.start()
    try:
        driver = make_driver(ScriptedSampler(write), pool, max_tokens=1000)
        columns = await run_group(driver, seeds=(1, 2))
        assert columns["num_turns"].tolist() == [6, 6]
        assert columns["turn_rewards"].tolist() == ([0.0] * 5 + [1.0]) * 2
        assert columns["environment_scores"].tolist() == [1.0, 1.0]
        assert {FinishReason(code) for code in columns["finish_reason"]} == {FinishReason.STOP}
        text = "".join(map(chr, columns["token_ids"]))
        assert text.startswith("?\n\n[S]FFF\nFHFH\nFFFH\nHFFGdown;[  (Down)\nSFFF\n[F]HFH")
        sampled = "".join(map(chr, columns["token_ids"][columns["loss_mask"]]))
        assert sampled == "".join(f"{move};" for move in SOLUTION * 2)
    finally:
        await pool.close()


@pytest.mark.parametrize(
    ("kind", "options", "module"),
    [
        ("gymnasium", {"id": "FrozenLake-v1"}, "gymnasium"),
        ("openenv", {"url": "ws://localhost/ws"}, "websockets.asyncio.client"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_to_install(monkeypatch, kind, options, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        load_user_class(EnvironmentConfig(kind=kind, options=options))
    start, _, end = str(caught.value).partition(f": import of {module} ")
    assert start == f"environment.kind={kind}"
    assert end.endswith(f"; run pip install 'streamrl[{kind}]'") and "\n" not in end


@pytest.mark.parametrize("kind", ADAPTER_CLASSES)
def test_an_option_that_an_adapter_does_not_take_is_refused(kind):
    with pytest.raises(ConfigError, match=r"environment.options: .*'(id|url|idd)'"):
        load_user_class(EnvironmentConfig(kind=kind, options={"idd": "x"}))


def test_the_examples_of_the_docs_can_be_loaded():
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    section = page.partition("\n## Adapters\n")[2].partition("\n## ")[0]
    kinds = []
    for block in re.findall(r"^```yaml\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE):
        config = EnvironmentConfig(**yaml.safe_load(block)["environment"])
        load_user_class(config)
        kinds.append(config.kind)
    assert kinds == [*ADAPTER_CLASSES]
