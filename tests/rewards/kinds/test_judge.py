import asyncio
import importlib
import json

import numpy as np
import pytest
from aiohttp import web

from streamrl.errors import ConfigError, RewardError, RewardInfraError, RewardTimeoutError
from streamrl.messages import Prompt
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.kinds import judge as endpoint_module
from streamrl.rewards.kinds.judge import parse_retry_after
from streamrl.rewards.registry import build_rewards
from streamrl.user_code import service_gate
from streamrl.user_code.reward_result import RewardOutcome
from tests.rewards.chat_server import MODEL, ChatServer
from tests.rewards.judged import EPISODE

CHAT = ({"role": "user", "content": "2+3"},)
PROMPT = Prompt("0:4:0", np.array([1], np.int32), messages=CHAT, ground_truth="5")
OPTIONS = {
    "model": MODEL,
    "template": "Q: {prompt}\nA: {completion}\nGold: {ground_truth}",
    "pattern": r"Score: (\S+)",
    "most": 10,
}


def answer_of(content):
    """Return the text after "A: " in the filled template."""
    return content.split("A: ")[1].split("\n")[0]


@pytest.fixture
async def server():
    """Run a judge that responds with the completion's own number."""
    running = ChatServer(lambda content: f"Score: 1\nno, Score: {answer_of(content)}")
    await running.start()
    yield running
    await running.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Shorten the waits between attempts and for the server to a hundredth."""
    reward_module = importlib.import_module("streamrl.rewards.interface.reward")
    monkeypatch.setattr(reward_module, "BACKOFF_S", reward_module.BACKOFF_S / 100)
    monkeypatch.setattr(endpoint_module, "POLL_INTERVAL_S", endpoint_module.POLL_INTERVAL_S / 100)


@pytest.fixture
def started(start_rewards):
    """Start rewards with a single judge."""

    async def start(url, *, replicas=1, timeout_s=5.0, **options):
        config = RewardConfig("judge", options={"url": url, **OPTIONS, **options})
        rewards = await start_rewards(config, replicas=replicas, timeout_s=timeout_s)
        await rewards.run_preflight()
        return rewards

    return start


async def judged(rewards, *texts, prompt=PROMPT):
    return (await rewards.judge_texts(prompt, list(texts))).components["judge"]


async def scores(rewards, *texts, prompt=PROMPT):
    return [result.score for result in await judged(rewards, *texts, prompt=prompt)]


async def test_the_last_number_the_judge_gives_is_the_score(server, started):
    results = await judged(await started(server.url), "7.5", "10", "0")
    assert [result.score for result in results] == [7.5, 10.0, 0.0]
    expected = [RewardOutcome.WRONG, RewardOutcome.PASS, RewardOutcome.WRONG]
    assert [result.outcome for result in results] == expected
    assert results[0].detail == "Score: 1\nno, Score: 7.5"
    lenient = await judged(await started(server.url, pass_score=7), "7.5", "6")
    assert [result.outcome for result in lenient] == [RewardOutcome.PASS, RewardOutcome.WRONG]


async def test_the_request_contains_the_options(server, started):
    rewards = await started(
        server.url + "/", temperature=0.3, max_tokens=9, request={"top_k": 4, "seed": 1}
    )
    await judged(rewards, "3")
    (request,) = server.requests
    messages = [{"role": "user", "content": "Q: 2+3\nA: 3\nGold: 5"}]
    options = {"temperature": 0.3, "max_tokens": 9, "top_k": 4, "seed": 1}
    assert request == {"model": MODEL, "messages": messages, **options}


async def test_a_conversation_in_a_template_with_other_braces(server, started):
    template = "{prompt}|A: {completion}\n{ground_truth} {other} {}"
    rewards = await started(server.url, template=template)
    chat = ({"role": "system", "content": "add"}, {"role": "user", "content": "2+3"})
    await judged(rewards, "3", prompt=Prompt("0:0:0", PROMPT.token_ids, chat, "", {"sum": 5}))
    (request,) = server.requests
    expected = 'system: add\n\nuser: 2+3|A: 3\n{"sum": 5} {other} {}'
    assert request["messages"][0]["content"] == expected


async def test_a_judge_of_conversations_reads_each_message_of_an_episode_with_its_calls(
    server, start_rewards
):
    server.reply = lambda content: "Score: 2"
    template = "{prompt} {completion}"
    for part in ("conversation", "last_turn"):
        options = {**OPTIONS, "url": server.url, "template": template}
        rewards = await start_rewards(RewardConfig("judge", of=part, options=options))
        result = await rewards.judge_group(PROMPT, [EPISODE])
        assert result.totals.tolist() == [2.0]
    conversation, last_turn = (request["messages"][0]["content"] for request in server.requests)
    lines = conversation.removeprefix("2+3 ").split("\n")
    assert [json.loads(line) for line in lines] == list(EPISODE.messages)
    assert last_turn == "2+3 5"


async def test_placeholders_in_a_completion_are_not_replaced(server, started):
    server.reply = lambda content: "Score: 2"
    hostile = ["{ground_truth} {prompt} {completion}", "{0} {} %s \\1 \\g<1>", "{{", "\ud800"]
    assert await scores(await started(server.url), *hostile) == [2.0] * 4
    contents = {request["messages"][0]["content"] for request in server.requests}
    assert contents == {f"Q: 2+3\nA: {text}\nGold: 5" for text in [*hostile[:3], "?"]}


async def test_requests_run_concurrently_up_to_the_limit(server, started):
    server.hold_until = 10
    rewards = await started(server.url)
    assert await scores(rewards, *map(str, range(10))) == [float(i) for i in range(10)]
    assert server.max_in_flight == 10
    server.hold_until, server.max_in_flight = 3, 0
    bounded = await started(server.url, concurrency=3)
    groups = [scores(bounded, "1", "2", "3") for _ in range(3)]
    assert await asyncio.gather(*groups) == [[1.0, 2.0, 3.0]] * 3
    assert server.max_in_flight == 3


async def test_a_busy_server_costs_no_attempt_and_its_retry_after_is_honored(server, started):
    refused = [(429, {"Retry-After": "0.3"}, "slow down"), (503, {"Retry-After": "0"}, "")]
    server.refusals = refused * 5
    rewards = await started(server.url, attempts=1, timeout_s=0.4)
    assert await scores(rewards, "4") == [4.0]
    pauses = np.diff(server.arrival_times)
    assert (pauses[::2] > 0.25).all() and (pauses[1::2] > 0.05).all()


async def test_server_errors_are_retried_per_completion(server, started):
    server.refusals = [(408, {}, "oops"), (409, {}, "oops"), (425, {}, "early")]
    rewards = await started(server.url)
    assert await scores(rewards, "4", "5", "6") == [4.0, 5.0, 6.0]
    assert len(server.requests) == 6
    server.refusals = [(409, {}, "locked")] * 3
    with pytest.raises(RewardInfraError, match="409: locked"):
        await scores(rewards, "4")


async def test_a_client_error_is_final(server, started):
    rewards = await started(server.url)
    server.requests.clear()
    server.refusals = [(400, {}, "the prompt is too long")] * 3
    with pytest.raises(RewardError, match="400: the prompt is too long") as error:
        await scores(rewards, "4")
    assert not isinstance(error.value, RewardInfraError)
    assert len(server.requests) == 1


async def test_a_hanging_server_exceeds_the_deadline(server, started):
    server.reply = lambda content: 60.0
    rewards = await started(server.url, timeout_s=0.5, attempts=2)
    with pytest.raises(RewardTimeoutError, match=r"/v1: no answer in 0\.5 s"):
        await scores(rewards, "4")
    assert len(server.requests) == 2
    server.reply = lambda content: "Score: 3"
    assert await scores(rewards, "4") == [3.0]


@pytest.mark.parametrize("way", ["closed", "hang", 503, 500, 401, 404, 200])
async def test_an_outage_costs_no_attempt_and_is_probed_by_one_request(
    server, started, way, monkeypatch
):
    monkeypatch.setattr(service_gate, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(service_gate, "PING_TIMEOUT_S", 0.1)
    rewards = await started(server.url, attempts=1, timeout_s=0.5 if way == "hang" else 30.0)
    if way == "closed":
        await server.close()
    else:
        server.is_out = way
    scoring = [asyncio.create_task(scores(rewards, str(i), str(i))) for i in range(4)]
    while not (outages := await service_gate.list_outages()):
        await asyncio.sleep(0.01)
    (outage,) = outages
    assert outage.service == server.url and outage.reason.startswith(server.url)
    await asyncio.sleep(0.5)
    assert len(server.requests) <= 8 + 3, "eight fail together, then one tries at a time"
    server.is_out = None
    if way == "closed":
        await server.start()
    assert await asyncio.gather(*scoring) == [[float(i)] * 2 for i in range(4)]
    assert await service_gate.list_outages() == []


async def test_a_text_that_breaks_the_server_again_and_again_is_no_outage(
    server, started, monkeypatch
):
    monkeypatch.setattr(service_gate, "FIRST_PAUSE_S", 0.01)
    server.reply = lambda content: (
        make_json_response(status=502) if answer_of(content) == "9" else "Score: 1"
    )
    rewards = await started(server.url, attempts=1)
    poisoned = asyncio.create_task(scores(rewards, "9"))
    while not poisoned.done():
        assert await scores(rewards, "1") == [1.0]
    with pytest.raises(RewardInfraError, match=r"502.*while the server answers"):
        await poisoned


async def test_the_last_text_that_breaks_the_server_is_no_outage_for_ever(
    server, started, monkeypatch
):
    monkeypatch.setattr(service_gate, "FIRST_PAUSE_S", 0.001)
    server.reply = lambda content: make_json_response(status=500)
    rewards = await started(server.url, attempts=1)
    with pytest.raises(RewardInfraError, match=r"500.*8 times"):
        await scores(rewards, "9")


@pytest.mark.parametrize("answer", ["no idea", "Score: 11", "Score: -1", "Score: nan", "Score: x"])
async def test_a_response_without_a_number_on_the_scale_is_never_a_score(server, started, answer):
    answers = iter([answer, answer, "Score: 6"])
    server.reply = lambda content: next(answers)
    rewards = await started(server.url)
    assert await scores(rewards, "4") == [6.0]
    server.reply = lambda content: answer
    message = f"matches no number from 0 to 10 in the judge's response: '{answer}'"
    with pytest.raises(RewardInfraError, match=message):
        await scores(rewards, "4")


def make_json_response(content_type="application/json", status=200, **body):
    return web.Response(text=json.dumps(body), content_type=content_type, status=status)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: make_json_response(choices=[]), "invalid response: IndexError"),
        (
            lambda: make_json_response(choices=[{"message": {"content": ["Score: 1"]}}]),
            "invalid response: TypeError: content is list, not text",
        ),
        (lambda: web.Response(text='["busy"]', status=409), r'409: \["busy"\]'),
        (
            lambda: make_json_response(
                choices=[{"message": {"content": None}, "finish_reason": "length"}]
            ),
            r"was cut at rewards\[0\]\.max_tokens=512; raise it: ''",
        ),
    ],
)
async def test_an_invalid_response_is_an_error(server, started, response, message):
    server.reply = lambda content: response()
    rewards = await started(server.url, attempts=1)
    with pytest.raises(RewardInfraError, match=message):
        await scores(rewards, "4")


async def test_the_key_comes_from_the_environment_and_is_redacted(server, started, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-somebody-elses")
    rewards = await started(server.url, api_key_env="JUDGE_KEY")
    server.refusals = [(400, {}, "the key sk-very-secret may not")]
    with pytest.raises(RewardError, match=r"400: the key \*\*\* may not"):
        await scores(rewards, "4")
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    await scores(await started(server.url), "4")
    assert "somebody" not in str(server.headers[-1])


async def test_the_preflight_waits_for_the_server(server):
    await server.close()
    rewards = build_rewards([RewardConfig("judge", options={"url": server.url, **OPTIONS})])
    with pytest.warns(match="/v1: Connect.*; waiting up to 60 s for the server") as caught:
        starting = asyncio.create_task(rewards.run_preflight())
        while not caught.list:
            assert not starting.done()
            await asyncio.sleep(0.01)
        await server.start()
        assert await starting == []


async def test_a_server_down_at_startup_refuses_the_run(server, started, monkeypatch):
    monkeypatch.setattr(endpoint_module, "STARTUP_TIMEOUT_S", 1.0)
    await server.close()
    message = r"\.url=http.*/v1: Connect.* \(for 1 s\)$"
    with pytest.warns(match="for the server"), pytest.raises(ConfigError, match=message):
        await started(server.url)


async def test_a_wrong_url_or_model_refuses_the_run(server, started):
    with pytest.raises(ConfigError, match=r"/v2: 404: .* \(GET http.*/v2/models\)"):
        await started(server.url.replace("v1", "v2"))
    with pytest.raises(ConfigError, match=rf"rewards\[0\].model=gpt: http.*/v1 has {MODEL}"):
        await started(server.url, model="gpt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "Rate it"}, "rewards[0].template: must contain {completion}"),
        ({"pattern": "("}, "pattern=("),
        ({"least": 10}, "least=10.0: must be below most=10.0"),
        (
            {"api_key_env": "NO_SUCH_KEY"},
            "api_key_env=NO_SUCH_KEY: this environment variable is not set",
        ),
        ({"api_key": "sk-1"}, "not an option of kind judge"),
    ],
)
def test_an_invalid_option_is_refused_before_the_run(options, message):
    with pytest.raises(ConfigError) as error:
        config = RewardConfig("judge", options={"url": "http://h/v1", **OPTIONS, **options})
        build_rewards([config])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_row_without_the_ground_truth_of_the_template_is_named():
    rewards = build_rewards([RewardConfig("judge", options={"url": "http://h/v1", **OPTIONS})])
    rewards.check_prompts([PROMPT])
    message = r"uid 0:7:0: .*template has \{ground_truth\}, the row has no"
    with pytest.raises(ConfigError, match=message):
        rewards.check_prompts([Prompt("0:7:0", PROMPT.token_ids, CHAT)])


def test_retry_after_is_read_in_seconds():
    headers = ("1.5", "-3", "soon", "", "Wed, 21 Oct 2026 07:28:00 GMT")
    assert [*map(parse_retry_after, headers)] == [1.5, 0.0, None, None, None]
