"""Docs match the code: tables, examples, links, the folder map."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from streamrl.cli.main import main
from streamrl.config.run_config import RunConfig, build_config
from streamrl.files.typed_settings import list_fixed_settings
from streamrl.rewards.interface.reward import RewardContext
from streamrl.rewards.registry import build_rewards
from streamrl.telemetry.metric_names import METRICS
from streamrl.user_code.reward_result import RewardOutcome
from tests.test_layering import ROOMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/README.md")),
]


def test_the_metrics_page_has_the_table_of_metrics():
    lines = ["| name | unit | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{m.name}` | {m.unit or '-'} | {m.meaning} |" for m in METRICS]
    assert "\n".join(lines) + "\n" in (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize(
    ("page", "options"),
    [("config", []), ("rewards", ["--rewards"]), ("algorithms", ["--algorithms"])],
)
def test_a_page_has_the_tables_that_the_command_prints(
    capsys: pytest.CaptureFixture[str], page: str, options: list[str]
):
    """Regenerate a page's tables with `streamrl config [--rewards|--algorithms] --markdown`."""
    assert main(["config", *options, "--markdown"]) == 0
    assert capsys.readouterr().out in read_page(page)


def test_the_queue_page_lists_the_settings_that_a_resumed_run_must_keep():
    text = re.search(r"These must stay: (.*?); coefficients", read_page("queue"), re.DOTALL)
    assert text is not None
    listed = set(re.findall(r"`(\w+(?:\.\w+)+)`", text[1])) - {"critic.trainer"}
    assert listed == set(list_fixed_settings(RunConfig))


def test_the_rewards_page_has_the_table_of_verdicts():
    verdicts_section = read_page("rewards").split("## Verdicts")[1]
    assert re.findall(r"^\| `(\w+)`", verdicts_section, flags=re.MULTILINE) == [
        outcome.value for outcome in RewardOutcome
    ]


def test_examples_of_custom_rewards_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs" / "own_reward.md").read_text()
    for code in re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        named = re.match(r"# (\w+\.py)\n", code)
        (tmp_path / (named[1] if named else "mine.py")).write_text(code)
    monkeypatch.chdir(tmp_path)
    entries = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(entries) == 2
    for entry in entries:
        settings = OmegaConf.create("model: {path: m}\ndata: {train: d}\n" + entry)
        config = build_config(RunConfig, settings, (), "own_reward.md", skips_dry_run=False)
        build_rewards(config.rewards, RewardContext(config.scorer))


def test_the_kubernetes_manifest_agrees_with_itself_and_with_the_slurm_script():
    script = (ROOT / "scripts" / "train.sbatch").read_text()
    (text,) = re.findall(
        r"^```yaml\n(.*?)^```", read_page("kubernetes"), flags=re.DOTALL | re.MULTILINE
    )
    cluster = yaml.safe_load(text)["spec"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert mounted == volumes.keys()
        names = {v["name"] for v in container["env"] if v["name"].startswith("RAY_")}
        assert names == set(re.findall(r"\b(RAY_(?:ACCEL|AUTH)[A-Z_]+)=", script))
        limits = container["resources"]["limits"]
        shm = parse_gib(volumes["shm"]["emptyDir"]["sizeLimit"])
        assert shm < parse_gib(limits["memory"])
        if store := group["rayStartParams"].get("object-store-memory"):
            assert int(store) < shm << 30
    assert any(name.startswith("rdma/") for name in limits)
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {"NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"} <= {v["name"] for v in container["env"]}


def parse_gib(quantity: str) -> int:
    """Return the GiB of a Kubernetes quantity such as 300Gi."""
    assert quantity.endswith("Gi")
    return int(quantity[:-2])


def read_page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_links_lead_to_existing_files_and_headings():
    dead = []
    for page in PAGES:
        for number, line in list_prose_lines(page):
            for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", line):
                target = page.parent / file if file else page
                if not target.exists() or (anchor and anchor not in list_anchors(target)):
                    link = f"{file}#{anchor}" if anchor else file
                    dead.append(f"{page.relative_to(ROOT)}:{number}: links to {link}")
    assert not dead, "\n".join(dead)


def list_prose_lines(page: Path) -> list[tuple[int, str]]:
    """Return the numbered lines outside of code blocks, without code spans."""
    text = page.read_text()
    text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    return [
        (number, re.sub(r"`[^`]*`", "", line))
        for number, line in enumerate(text.splitlines(), start=1)
    ]


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, named as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_folder_map_names_the_packages_and_modules_in_their_order():
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The rooms")[1]
    text = text.split("\n## ")[0]
    named = re.findall(r"^  ([a-z_]+)(?:/|\.py)", text, flags=re.MULTILINE)
    assert named == [*reversed(ROOMS)]


def test_modules_that_pages_name_exist():
    folders = ("streamrl", "tests", "benchmarks", "examples", "scripts")
    modules = [
        f"/{p.relative_to(ROOT)}" for folder in folders for p in (ROOT / folder).rglob("*.py")
    ]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"`([\w.-]+/[\w./-]*\.py)`", page.read_text())
        if not any(module.endswith(f"/{name}") for module in modules)
    ]
    assert not missing, "\n".join(missing)


def test_tests_that_pages_name_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"`(test_\w+)`", page.read_text())
        if f"def {name}(" not in tests
    ]
    assert not missing, "\n".join(missing)


def test_the_walks_name_existing_files_and_count_them():
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text.split("## The way of a prompt, and of a version\n")[1].split("\n## ")[0]
    prompt, version = re.split(r"^\*\*An optimizer step", walk, flags=re.MULTILINE)
    read, also_run, both = (int(n) for n in re.findall(r"(\d+)(?: files|\)|\stogether)", prompt))
    sums = [sum(column) for column in zip(*map(count_files, list_rows(prompt)), strict=True)]
    assert (sums, sum(sums)) == ([read, also_run], both)
    (total,) = re.findall(r"(\d+) files", version)
    assert sum(count_files(row)[0] for row in list_rows(version)) == int(total)


def list_rows(section: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table, without its two header lines."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def count_files(row: list[str]) -> tuple[int, int]:
    """Return the files of a row of a walk, and those that also run; all must exist.

    A name without a folder is in that of the name before it.
    """
    counts = []
    for cell in (row[1], row[3] if len(row) > 3 else ""):
        folder = ROOT / "streamrl"
        names = re.findall(r"`([\w/]+(?:\.py|/))`", cell)
        for name in names:
            roots = (folder, *folder.parents)
            found = [root / name for root in roots if (root / name).exists()]
            assert found, f"{row[0]}: no file {name}"
            folder = found[0].parent
        counts.append(len(names))
    assert counts[0] == int(row[2]), row[0]
    return counts[0], counts[1]
