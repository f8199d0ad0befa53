"""Every page of the documentation: links resolve, code blocks are valid, and generated pages match the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.exceptions import TyperException

from documentation.__main__ import made
from services.config.explain import keys
from services.config.load import ConfigError, validate
from services.console.commands.__main__ import app, with_waits

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ )?(?:\S*/)?grpo (.*)$")
BETWEEN = re.compile(r"\s*(?:&&|;|>+|\|(?!STEP))\s*(?=(?:[^']*'[^']*')*[^']*$)")  # separators of commands, outside quotes
KEYS = {re.sub(r"\[\](\([^)]*\))?", "", key.key) for key in keys()}
FREE = ("generator.engine_options", "data.chat_template_options")
BASE: dict[str, Any] = {
    "model": {"path": "m"}, "data": {"sources": [{"kind": "jsonl", "path": "p.jsonl"}]}, "verifiers": [{"kind": "math"}],
}  # fmt: skip


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    return (text for language, text in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `grpo` command in the page's code blocks; a trailing backslash continues a line."""
    for text in blocks(page, "", "sh", "bash", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(BETWEEN, line.partition(" #")[0].strip()):
                if found := COMMAND.match(re.sub(r"^kubectl exec deploy/\S+ -- ", "", part)):
                    yield shlex.split(found[1])


def parsed(arguments: list[str]) -> list[str]:
    """Parse a command as `grpo` does, without running it; return its overrides."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("grpo", with_waits(arguments))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(rest), parent=context)
    return context.params.get("overrides") or []


def completed(fragment: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the fragment, completed with a model, a source and a verifier if needed."""
    whole = deepcopy(BASE)
    for section, value in fragment.items():
        whole[section] = {**whole.get(section, {}), **value} if isinstance(value, dict) else value
    return whole


def prose(page: Path) -> str:
    """Return the text of a page without its code."""
    return CODE.sub("", BLOCK.sub("", page.read_text(encoding="utf-8")))


def test_links_resolve_to_files() -> None:
    links = [(page, link) for page in PAGES for link in LINK.findall(prose(page))]
    assert len(links) > 100
    inner = [(page, link) for page, link in links if not link.startswith(("http:", "https:", "#", "mailto:"))]
    assert [(named(page), link) for page, link in inner if not (page.parent / link.partition("#")[0]).exists()] == []


def test_placeholders_are_not_rendered_as_tags() -> None:
    """Outside code, Markdown renders nothing for <pod>."""
    pages = [*PAGES, ROOT / "charts" / "README.md"]
    assert {named(page): tags for page in pages if (tags := re.findall(r"<[A-Za-z][^>]*>", prose(page)))} == {}


def test_toml_blocks_are_valid_configurations_or_fragments() -> None:
    wrong = dict[str, str]()
    for page, text in [(each, text) for each in PAGES for text in blocks(each, "toml")]:
        given = tomllib.loads(text)
        assert given, f"{named(page)}: a block must set a key"
        try:
            validate(completed(given), named(page))
        except ConfigError as error:
            wrong[named(page)] = str(error)
    assert wrong == {}


def test_commands_exist_with_their_options() -> None:
    wrong = list[tuple[str, list[str], str]]()
    for page, arguments in [(each, arguments) for each in PAGES for arguments in commands(each)]:
        try:
            keys = [override.partition("=")[0] for override in parsed(arguments)]
        except TyperException as error:
            wrong.append((named(page), arguments, str(error)))
        else:
            wrong += [(named(page), arguments, key) for key in keys if key not in KEYS and not key.startswith(FREE)]
    assert wrong == []


def test_keys_in_the_migration_table_exist() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "howto" / "migrate.md").read_text(encoding="utf-8"), re.MULTILINE)
    given = [key for row in rows for key in re.findall(r"`([^`]+)`", row)]
    assert len(given) > 30
    assert {re.sub(r"\[\](\([^)]*\))?", "", key) for key in given} <= KEYS


def test_generated_pages_match_the_code() -> None:
    for page, text in made().items():
        assert page.read_text(encoding="utf-8") == text, f"{named(page)}: run make generate"


def test_every_page_is_in_the_navigation() -> None:
    def paths(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for inner in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from paths(inner)

    given = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs)) for page in docs.rglob("*.md") if not page.match("decisions/0*.md")}
    assert set(paths(given["nav"])) == pages


def test_the_index_of_decisions_names_each() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in sorted(folder.glob("0*.md")) if f"]({page.name})" not in index] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],  # with -q, warnings would not be reported
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in tmp_path.rglob("*.html"):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        words = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        assert not re.search(r"\n(- |\d+\. |\|)", words), f"{page.name} has a list or a table that is shown as text"
    assert "Debug a run that does not learn" in (tmp_path / "index.html").read_text(encoding="utf-8")
