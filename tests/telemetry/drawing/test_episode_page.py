"""The HTML page of recorded rollouts."""

import json
import math
import re
from html.parser import HTMLParser
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streamrl.telemetry.drawing.episode_page import groups_to_json, render_page
from streamrl.telemetry.rollout_log import RecordedGroup, RecordedRollout
from tests.telemetry.drawing.recorded import make_group, make_guess


class PageParser(HTMLParser):
    """Parser that collects tags with their attributes, ids, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


GROUP = make_group([make_guess("50", score=1.0), make_guess("80", score=0.0)])
EMPTY_PAGE = PageParser(render_page("run", []))
HOSTILE = st.sampled_from(
    ["</script>", "<!--", "<script>", "]]>", "\\", '"', "\u2028", "\ud800", "\x00", "@DATA@"]
)
TEXTS = st.lists(HOSTILE | st.text(st.characters()), max_size=4).map("".join)


@given(TEXTS, TEXTS, TEXTS)
def test_no_text_of_a_run_changes_the_page(text: str, uid: str, title: str):
    rollout = make_guess(text, score=1.0, answer=text)
    page = PageParser(render_page(title, [make_group([rollout], uid=uid, ground_truth=text)]))
    (group,) = page.data["groups"]
    assert (page.data["title"], group["uid"], group["ground_truth"]) == (title, uid, text)
    assert [t["text"] for t in group["rollouts"][0]["turns"]] == [t.text for t in rollout.turns]
    assert page.tags == EMPTY_PAGE.tags
    assert page.scripts[1:] == EMPTY_PAGE.scripts[1:]


def test_the_page_is_encoded_in_ascii_data_and_needs_no_other_file():
    page = render_page("run", [make_group([make_guess("\ud800ä", score=1.0)])])
    page.encode()
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp", page)
    policy = next(attrs["content"] for tag, attrs in EMPTY_PAGE.tags if "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none';")


def test_text_enters_the_document_only_as_text():
    (_, script) = EMPTY_PAGE.scripts
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)


def test_every_element_that_the_script_looks_up_exists():
    ids = {attrs["id"] for _, attrs in EMPTY_PAGE.tags if "id" in attrs}
    (_, script) = EMPTY_PAGE.scripts
    named = set(re.findall(r'(?:control|getElementById)\("(\w+)"\)', script))
    assert named <= ids and len(named) > 3


def test_scores_are_also_relative_to_the_mean_of_their_group():
    (group,) = groups_to_json([GROUP])["groups"]
    assert group["mean_score"] == 0.5
    assert [r["relative_score"] for r in group["rollouts"]] == [0.5, -0.5]
    turn = group["rollouts"][0]["turns"][1]
    assert turn["logprobs"] == (-0.5, None)


def test_scores_that_are_not_finite_are_null():
    group = RecordedGroup(1, "0:0:0", (RecordedRollout("", math.nan), RecordedRollout("", 1.0)))
    (described,) = PageParser(render_page("run", [group])).data["groups"]
    assert described["mean_score"] is None
    assert [(r["score"], r["relative_score"]) for r in described["rollouts"]] == [
        (None, None),
        (1.0, None),
    ]
