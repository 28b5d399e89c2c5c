"""Claims: what contributors and visitors are given at the root agrees with what CI does and with the package."""

import re
import tomllib
from pathlib import Path

import yaml

import ptqpipe

ROOT = Path(__file__).resolve().parent.parent


def test_pre_commit_runs_what_ci_calls_lint() -> None:
    lint = (ROOT / ".ci" / "run").read_text(encoding="utf-8").partition('step "lint"\n')[2].partition("\n\n")[0]
    wanted = [line.replace('"$bin/', ".venv/bin/").replace('"', "") for line in lint.splitlines()]
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {repo["repo"] for repo in config["repos"]} == {"local"}  # nothing is fetched
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert len(wanted) == 2
    assert [hook["entry"] for hook in hooks] == wanted
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in hooks)


def test_the_workflow_runs_the_script_of_contributors() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_issue_forms_ask_for_doctor() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))["body"]
        labels = {one["attributes"]["label"]: one for one in fields if one["type"] != "markdown"}
        assert labels["What `ptqpipe doctor` prints"]["validations"]["required"]


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (str(citation["version"]), citation["license"]) == (ptqpipe.__version__, project["license"])
    papers = [paper["url"] for paper in citation["references"]]
    assert len(set(papers)) == len(papers)
    assert all(re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", url) for url in papers)
    assert all(paper["authors"] and paper["title"] and paper["notes"] for paper in citation["references"])
