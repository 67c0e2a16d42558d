"""The README and the pages of docs/: examples run, links lead somewhere, tables are up to date."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from python_process import REPOSITORY, run_code, run_programs, run_python

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """Returns the anchors of the headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), target


def test_files_that_pages_name_exist():
    for page in PAGES:
        for name in re.findall(
            r"`((?:fastgen|tests|benchmarks|docs|csrc)/[\w./-]*)`", page.read_text(encoding="utf-8")
        ):
            assert (REPOSITORY / name).exists(), f"{page.name}: {name}"


def test_git_ignores_what_the_readmes_commands_write():
    if not (REPOSITORY / ".git").exists():
        pytest.skip("no repository of git")
    page = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^fastgen-generate-for-transformers \S+ \S+ (\S+)", page, re.MULTILINE))
    assert written
    for name in (f"{output}{suffix}" for output in written for suffix in ("", ".part", ".run.json")):
        done = subprocess.run(["git", "check-ignore", "--quiet", name], cwd=REPOSITORY)
        assert done.returncode == 0, name


def test_the_glossary_defines_each_class_of_the_concepts():
    """A class that it names in its first table is in the file that stands beside it, or in the folder."""
    page = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = page.partition("## The twelve concepts")[2].partition("\n## ")[0]
    rows = [row.split("|")[1:4] for row in table.splitlines() if row.startswith("| ") and "---" not in row][1:]
    assert len(rows) == 12
    for concept, meaning, where in rows:
        sources = ""
        for place in re.findall(r"`(fastgen/[^`]+)`", where):
            path = REPOSITORY / place
            files = [path] if path.is_file() else sorted(path.glob("*.py"))
            sources += "".join(file.read_text(encoding="utf-8") for file in files)
        for name in re.findall(r"`([A-Z]\w+|verify_once)`", concept):
            assert meaning.strip() and re.search(rf"^(class|def) {name}\b", sources, re.MULTILINE), name


def python_of(page: str) -> list[str]:
    """Returns the blocks of Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(encoding="utf-8"), re.DOTALL)


SPOKEN = "thirty one books for seven dollars"
EXAMPLES = {  # the page, and what holds after its first example
    "README.md": "fastgen.explain().rows == 4",
    "docs/constrained.md": "fastgen.explain().kernels['prefix trie: allowed tokens alone']",
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_first_example_of_a_page_runs_without_a_network(page):
    pytest.importorskip("transformers")
    assert SPOKEN in run_code(f"{python_of(page)[0]}\nassert {EXAMPLES[page]}\n", HF_HUB_OFFLINE="1")


*ROLLOUTS, OF_TRL = sorted(python_of("docs/rollouts.md"), key=lambda code: "GRPO" in code)


@pytest.mark.parametrize("page", ("models", "rollouts"))
def test_the_examples_of_a_page_run_without_a_network(page, tmp_path):
    codes = ROLLOUTS if page == "rollouts" else python_of("docs/models.md")
    codes = [code for code in codes if "fairseq" not in code or find_spec("fairseq")]
    assert len(codes) > 2
    run_programs(codes, tmp_path, HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_the_example_of_trl_reports_rollout_and_scoring(tmp_path):
    """The page shows what it prints; seconds and calls of kernels are those of a machine."""
    pytest.importorskip("trl")
    done = run_python("-c", OF_TRL, cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    page = (REPOSITORY / "docs" / "rollouts.md").read_text(encoding="utf-8")
    shown = page.partition("The example ends with these lines:\n\n```text\n")[2].partition("```")[0]
    for line in ("decode steps captured; prompts shared\n", "prompts and a prefix of 10 tokens shared\n"):
        assert line in done.stdout and line in shown


def test_programs_of_users_run_without_a_network(tmp_path):
    """What a pipeline, a recognizer, `TextGenerator`, a trainer, LoRA and the harness print."""
    shown = ["thirty", "4 texts", "thirty", "thirty", "thirty", "thirty"]
    codes = dict(zip(python_of("docs/coming-from.md"), shown, strict=True))
    absent = [package for package in ("peft", "lm_eval") if not find_spec(package)]
    codes = {code: words for code, words in codes.items() if not any(f"from {name}" in code for name in absent)}
    for words, printed in zip(codes.values(), run_programs([*codes], tmp_path, HF_HUB_OFFLINE="1"), strict=True):
        assert words in printed


RECIPES = python_of("docs/scaling.md")


def test_the_recipe_for_datasets_runs():
    pytest.importorskip("datasets")
    assert SPOKEN in run_code(RECIPES[0], HF_HUB_OFFLINE="1")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_the_recipe_for_ray_data_runs():
    pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    assert SPOKEN in run_code(RECIPES[1], HF_HUB_OFFLINE="1", RAY_ADDRESS="local")  # not another program's cluster


def test_the_table_of_versions_holds_the_matrixs_results(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "tools" / "matrix")
    import run

    rows = json.loads(run.RESULTS.read_text(encoding="utf-8"))
    assert {row["name"] for row in rows} <= {combination.name for combination in run.COMBINATIONS}
    assert run.BEGIN + run.table(rows) + run.END in run.PAGE.read_text(encoding="utf-8")
    sys.modules.pop("run")


@pytest.fixture
def generated_pages(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("fairseq")
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    import generated_pages

    yield generated_pages
    sys.modules.pop("generated_pages")


@pytest.mark.parametrize("name", ["reasons.md", "flags.md"])
def test_generated_pages_are_up_to_date(generated_pages, name):
    text = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    assert text == generated_pages.page(name), "make pages"


def test_table_of_checks_has_the_codes_of_registered_functions(generated_pages):
    """Codes of one part, of a table of arguments, of both hosts, and of different parts by host; no decisions."""
    rows = {line.split("`")[1]: line for line in generated_pages.reasons().splitlines() if line.startswith("| `")}
    assert rows["SYNCED_GPUS"].endswith("| decoding loop (T) |")
    assert rows["ARGUMENT_ROWS"].endswith("| prompt sharing (T), finished inputs (T) |")
    parts = "prompt sharing (T), decoding loop (T), decode steps (T F), finished inputs (T), drafts (T)"
    assert rows["TORCH_MODE"].endswith(f"| {parts} |")
    parts = "common prefix (T), decoding loop (F), decode steps (T), drafts (T)"
    assert rows["ATTENTION"].endswith(f"| {parts} |")
    assert rows["FEW_STEPS"].count("|") == 3
    assert all(generated_pages._codes_of(function.__code__) for function, _ in generated_pages.report.CHECKS)
