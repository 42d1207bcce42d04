"""The site of `make docs`: built without a warning, complete, without dead links."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import FENCE, ROOT
from tests.docs.links import find_dead_links, list_linked_pages, read_page

PAGES = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
API_IMPORT = re.compile(r"^from (streamrl[\w.]*) import (.+)$", re.MULTILINE)


def test_dead_links_are_found(tmp_path: Path):
    (tmp_path / "picture.png").touch()
    (tmp_path / "b.html").write_text('<h1 id="top">B</h1>')
    alive = '<a href="b.html#top"> <a href="#me" id="me"> <img src="picture.png">'
    dead = '<a href="c.html"> <a href="b.html#bottom"> <a href="#you"> <img src="other.png">'
    (tmp_path / "a.html").write_text(alive + '<a href="https://example.org/x">' + dead)
    assert find_dead_links(tmp_path) == [
        "a.html: c.html",
        "a.html: b.html#bottom",
        "a.html: #you",
        "a.html: other.png",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    pytest.importorskip("sphinx", reason="`make docs` installs what it needs")
    folder = tmp_path_factory.mktemp("docs").resolve()
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"-m (sphinx .*?) build/docs ", recipe)
    words = shlex.split(line.replace("build/doctrees", str(folder / "doctrees")))
    done = subprocess.run(
        [sys.executable, "-m", *words, str(folder / "html")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder / "html"


@pytest.mark.slow
def test_every_link_leads_somewhere(site: Path):
    assert find_dead_links(site) == []


@pytest.mark.slow
def test_the_navigation_has_every_page_of_docs(site: Path):
    home = site / "docs" / "index.html"
    assert home in list_linked_pages(site / "index.html")
    linked = {home, *list_linked_pages(home)}
    missing = [page for page in PAGES if site / page.with_suffix(".html") not in linked]
    assert not missing


@pytest.mark.slow
def test_the_api_has_everything_that_guides_import(site: Path):
    api = (site / "docs" / "api").glob("*.html")
    documented = set().union(*(read_page(page).anchors for page in api))
    imported = {
        f"{module}.{name}"
        for page in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md"))
        for language, block in FENCE.findall(page.read_text())
        for module, names in API_IMPORT.findall(block)
        for name in names.split(", ")
    }
    assert {"streamrl.environments.Turn", "streamrl.own_loops.PROTOCOLS"} <= imported
    assert imported <= documented
