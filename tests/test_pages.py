"""The README and the pages: what is printed is what commands and programs print, and every link leads somewhere."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
import warnings
from pathlib import Path

import matplotlib
import pytest

import megatron_fsdp
from megatron_fsdp.cli.main import main
from tests.support.forked_programs import Program, in_folder
from tests.support.source_tree import ROOT, own_files
from tests.support.train_program import LIMIT_S, environment
from tools.pages import (
    DOCS,
    GENERATED,
    IMAGES,
    PAGES,
    PICTURES,
    PROGRAM,
    SLOW,
    WHOLE,
    Block,
    blocks_of,
    brought_up_to_date,
    programs_of,
)

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NAMED = re.compile(r"docs/(?P<target>[\w/]+\.(?:md|json|png)(?:#[\w-]+)?)")
_HEADING = re.compile(r"^#+ (?P<title>.*)$", re.MULTILINE)
_FIGURE = re.compile(r"\d[\d,]*\.\d+ ?(?:[KMGT]i?B|m?s|us|%|x)(?!\w)")
_ERRORS = re.compile(r"^    \$ mfsdp train (.*)\n((?:    error: .*\n)+)", re.MULTILINE)
_LOSS = re.compile(r"(\d+)(?:: loss)? ([\d.]+)$", re.MULTILINE)
BLOCKS = {f"{page.stem}: {block.asked}": block for page in PAGES for block in blocks_of(page)}


def run(folder: Path, ranks: int, *words: str) -> str:
    """Run a program in a folder, by torchrun where there are ranks; returns what it prints."""
    program = Program(in_folder, [str(folder), str(ranks), *words], environment())
    printed, errors = program.communicate(timeout=LIMIT_S)
    assert program.returncode == 0, errors[-2000:]
    return printed


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall(printed)}


def write_programs(page: Path, folder: Path) -> None:
    for name, code in programs_of(page).items():
        (folder / name).write_text(code)


# ---- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_first_program_of_the_readme_trains_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    first = PROGRAM.search((ROOT / "README.md").read_text())
    assert first is not None
    (tmp_path / "train.py").write_text(first["code"])
    one, two = (losses(run(tmp_path, ranks, "train.py")) for ranks in (1, 2))
    assert list(one) == list(range(10))
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.full
def test_the_programs_of_the_tutorial_run_one_after_another(tmp_path: Path) -> None:
    write_programs(DOCS / "tutorial.md", tmp_path)
    plain = losses(run(tmp_path, 0, "plain.py"))
    assert list(plain) == [10, 20]
    assert losses(run(tmp_path, 2, "sharded.py")) == pytest.approx(plain, rel=1e-3)
    at_once = losses(run(tmp_path, 1, "resumable.py", "40"))
    (tmp_path / "runs").rename(tmp_path / "at_once")
    begun, gone_on = run(tmp_path, 2, "resumable.py", "20"), run(tmp_path, 3, "resumable.py", "40")
    assert list(losses(gone_on)) == [30, 40]
    assert losses(begun) | losses(gone_on) == pytest.approx(at_once, rel=1e-3)
    assert "loaded 67073 parameters" in run(tmp_path, 0, "load.py")


@pytest.mark.full
def test_the_program_that_records_a_trace_runs(tmp_path: Path) -> None:
    write_programs(DOCS / "debugging.md", tmp_path)
    run(tmp_path, 2, "record.py")
    printed = run(tmp_path, 0, "-m", "megatron_fsdp.cli", "trace", "traces")
    assert re.findall(r"^ +(\d) +(\d) +\d", printed, re.MULTILINE) == [("0", "0"), ("1", "0")]


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchtitan", "accelerate", "trainer"])
def test_examples_of_fsdp2_train_alike_on_torchs_and_on_ours(name: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / f"fsdp2_{name}.py")
    ours, theirs = (losses(run(tmp_path, 2, program, *words)) for words in ((), ("torch",)))
    assert len(ours) >= 5
    assert ours == pytest.approx(theirs, abs=2e-5)


def test_what_snippets_import_is_there() -> None:
    for snippet in PROGRAM.finditer("\n".join(page.read_text(encoding="utf-8") for page in PAGES)):
        for node in ast.walk(ast.parse(textwrap.dedent(snippet["code"]))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_fsdp"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # other libraries' own
                    module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


# ---- generated parts -------------------------------------------------------------------------------------------------


@pytest.mark.unmerged
@pytest.mark.full(short=[name for name, block in BLOCKS.items() if not block.asked.startswith(SLOW)])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_what_a_page_prints_is_what_is_generated(block: Block) -> None:
    assert block.text == block.generate(), "run `make pages`"


@pytest.mark.parametrize("name", WHOLE)
def test_a_page_of_tables_is_what_is_generated(name: str) -> None:
    page = next(page for page in PAGES if page.name == name)
    assert page.read_text(encoding="utf-8") == WHOLE[name](), "run `make pages`"


def test_generated_parts_are_written_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marked = "before\n\n    <!-- generated: picture plan -->\n    old\n    <!-- end -->\nafter\n"
    page.write_text(marked)
    assert [(block.asked, block.text) for block in blocks_of(page)] == [("picture plan", "old")]
    shown = f"![{PICTURES['plan'].caption}](images/plan.png)"
    assert brought_up_to_date(page) == marked.replace("    old\n", f"\n    {shown}\n\n")


@pytest.mark.full(short=["precision_parity"])
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_is_drawn(name: str, tmp_path: Path) -> None:
    published = (IMAGES / f"{name}.png").read_bytes()
    if f"version{matplotlib.__version__}".encode() not in published:
        pytest.skip("another matplotlib drew it")
    PICTURES[name].draw(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes() == published, "run `make pages`"


def test_every_picture_is_shown_somewhere() -> None:
    shown = {Path(found).stem for page in PAGES for found in re.findall(r"\(images/([\w.]+)\)", page.read_text())}
    assert shown == set(PICTURES) == {path.stem for path in IMAGES.iterdir()}


def test_measured_figures_stand_in_generated_parts_only() -> None:
    written = {
        page.name: GENERATED.sub("", page.read_text(encoding="utf-8")) for page in PAGES if page.name not in WHOLE
    }
    found = {name: _FIGURE.findall(text) for name, text in written.items()}
    assert {name: figures for name, figures in found.items() if figures} == {}


def test_errors_that_pages_print_are_those_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    printed = [found for text in texts for found in _ERRORS.findall(text)]
    assert len(printed) == 2
    for words, errors in printed:
        assert main(["train", *words.split()]) == 2
        assert capsys.readouterr().err.splitlines() == textwrap.dedent(errors).splitlines()


def said(file: Path) -> list[str]:
    """The texts in a file, with an ellipsis for each value that is filled in."""
    whole, parts = [], set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):  # from the outside in
        if isinstance(node, ast.JoinedStr):
            parts |= {id(each) for each in node.values}
            whole.append("".join(str(each.value) if isinstance(each, ast.Constant) else "..." for each in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            whole.append(node.value)
    return whole


def test_every_message_that_troubleshooting_explains_is_one_of_the_source() -> None:
    ours, _, _ = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").partition("## Of PyTorch")
    rows = re.findall(r"^\| (`.*?) \| .+ \| .+ \|$", ours, re.MULTILINE)
    explained = [words for row in rows for words in re.findall("`(.+?)`", row)]
    source = "\0".join(text for file in sorted((ROOT / "src").rglob("*.py")) for text in said(file))
    assert len(explained) > 30
    assert [words for words in explained if words not in source] == []


def test_every_finding_about_a_hang_is_one_that_tests_see() -> None:
    seen = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "hang").glob("*.py"))
    quoted = re.findall(r"^\| `((?:rank 1|all ranks) [^`]*)`", (DOCS / "debugging.md").read_text(), re.MULTILINE)
    assert len(quoted) == 6
    assert [words for words in quoted if words.replace("rank 1 left", "ranks 1, 2 left") not in seen] == []


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links."""
    titles = (
        found["title"] for found in _HEADING.finditer(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    )
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def leads_somewhere(page: Path, target: str) -> bool:
    file, _, anchor = target.partition("#")
    path = page.parent / file if file else page
    return path.exists() and (not anchor or anchor in anchors(path))


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    for page in (ROOT / "CONTRIBUTING.md", *PAGES):
        targets = [found["target"] for found in _LINK.finditer(page.read_text(encoding="utf-8"))]
        local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
        assert [target for target in local if not leads_somewhere(page, target)] == [], page


def test_pages_that_code_and_messages_name_are_there() -> None:
    texts = [path for path in own_files() if path.suffix in (".py", ".md", ".yaml", ".toml", ".sbatch")]
    named = {
        (str(path.relative_to(ROOT)), found["target"])
        for path in texts
        if path.name != "CHANGELOG.md"
        for found in _NAMED.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert {each for each in named if not leads_somewhere(DOCS / "index.md", each[1])} == set()


def test_files_that_the_design_names_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", (DOCS / "design.md").read_text(encoding="utf-8")))
    files = [path.as_posix() for path in own_files()]
    assert len(named) > 30
    assert {name for name in named if not any(file.endswith(f"/{name}") for file in files)} == set()


def test_the_index_and_the_navigation_name_every_page() -> None:
    names = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    links = _LINK.finditer((DOCS / "index.md").read_text())
    listed = {found["target"].partition("#")[0] for found in links} - {"../README.md"}
    navigated = re.findall(r"- (?:.*: )?(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert listed == names
    assert sorted(navigated) == sorted({*names, "index.md"})


def test_every_public_name_is_in_the_reference() -> None:
    paths = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    shown = [pkgutil.resolve_name(path) for path in paths]
    documented = ".experimental .fsdp2 .ddp .weights .checkpoint .checkpoint.hf .doctor .plan"
    for name in ("", *documented.split()):
        module = importlib.import_module(f"megatron_fsdp{name}")
        public = {each: getattr(module, each) for each in module.__all__ if not each.startswith("__")}
        ours = {
            each
            for each, value in public.items()
            if getattr(value, "__module__", "megatron_fsdp").startswith("megatron_fsdp")
        }
        assert [each for each in ours if module not in shown and public[each] not in shown] == [], module


# ---- the page on coming from elsewhere -------------------------------------------------------------------------------


def test_arguments_and_methods_that_the_tables_of_migration_name_are_there() -> None:
    """In the right column `keyword=` is an argument, `model.method` a method."""
    lines = (line.strip() for line in (DOCS / "migration.md").read_text(encoding="utf-8").splitlines())
    ours = " ".join(line.split(" | ")[1] for line in lines if line.startswith("| "))
    takers = (
        megatron_fsdp.fully_shard,
        megatron_fsdp.MegatronFSDP,
        megatron_fsdp.DistributedDataParallelConfig,
        megatron_fsdp.MixedPrecisionPolicy,
        megatron_fsdp.MegatronFSDP.full_parameters_context,
        megatron_fsdp.MegatronFSDP.join,
    )
    arguments = {name for taker in takers for name in inspect.signature(taker).parameters}
    named = set(re.findall(r"`(\w+)=", ours)) | set(re.findall(r"[(,] ?(\w+)=", ours))
    assert len(named) > 30
    assert named - arguments == set()
    methods = set(re.findall(r"`model\.(\w+)", ours)) - {"bfloat16", "half", "module"}
    assert len(methods) > 10
    assert {name for name in methods if not hasattr(megatron_fsdp.MegatronFSDP, name)} == set()


# ---- versions ----


def test_one_version_and_date_stands_everywhere() -> None:
    version, date = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[
        0
    ]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version == megatron_fsdp.__version__
    assert f"version: {version}\ndate-released: {date}\n" in citation


def test_the_versions_in_the_readme_are_those_that_are_pinned_and_allowed() -> None:
    rows = re.findall(r"^\| (?:\w+)? ?\|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    names, tested, allowed = (
        [cell.strip() for cell in row.split("|")] for row in rows if "3.11" in row or "trl" in row
    )
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert len(names) == 7
    for name, seen, oldest in zip(names, tested, allowed, strict=True):
        pinned = pins.get(name.lower(), "3.11")  # the newest of those that were tested, or a Python
        assert pinned in seen.split(", "), name
        least = oldest.removeprefix("from ").split(" ")[0]
        assert re.search(rf"{'requires-python = .' if name == 'Python' else name.lower()}>={least}\b", project), name


# ---- the README's warning --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("summary", "times"), [("Megatron-FSDP by NVIDIA", 1), ("an independent implementation", 0)])
def test_the_other_distribution_of_the_same_import_name_is_warned_of_once(
    tmp_path: Path, summary: str, times: int
) -> None:
    other = tmp_path / "megatron_fsdp-0.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-fsdp\nVersion: 0.9\nSummary: {summary}\n")
    (tmp_path / "twice.py").write_text(
        "import sys, warnings\n"
        "sys.path.insert(0, '.')\n"
        "from torch import nn\n"
        "from megatron_fsdp import fully_shard_model\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            fully_shard_model(nn.Linear(2, 2), zero_dp_strategy=9)\n"
        "        except ValueError:\n"
        "            pass\n"
        "print(sum('beside mfsdp' in str(each.message) for each in caught))\n"
    )
    assert run(tmp_path, 0, "twice.py").split() == [str(times)]
