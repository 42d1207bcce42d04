"""The site of `make docs`: built without a warning, with the API that guides import.

Warnings are errors, also those of a page that no table of contents has, and of a link that leads
nowhere; the links between Markdown files have a quick test in tests/test_docs.py.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.commands import FENCE, ROOT

API_IMPORT = re.compile(r"^from (streamrl[\w.]*) import (.+)$", re.MULTILINE)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_has_everything_that_guides_import(tmp_path: Path):
    pytest.importorskip("sphinx", reason="`make docs` installs what it needs")
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"-m (sphinx .*?) build/docs ", recipe)
    words = shlex.split(line.replace("build/doctrees", str(tmp_path / "doctrees")))
    done = subprocess.run(
        [sys.executable, "-m", *words, str(tmp_path / "html")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    api = (tmp_path / "html" / "docs" / "api").glob("*.html")
    documented = {name for page in api for name in re.findall(r'id="([^"]+)"', page.read_text())}
    imported = {
        f"{module}.{name}"
        for page in (*(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*/README.md"))
        for language, block in FENCE.findall(page.read_text())
        for module, names in API_IMPORT.findall(block)
        for name in names.split(", ")
    }
    assert {"streamrl.environments.Turn", "streamrl.own_loops.PROTOCOLS"} <= imported
    assert imported <= documented
