"""The README's snippets run, its commands have the options they name, its links lead somewhere."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import zipage
from zipage.cli import app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.strip()
    for language, block in BLOCKS
    if not language
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("zipage ")
]


def test_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    answer, stream = (block for language, block in BLOCKS if language == "python")
    names: dict[str, Any] = {}
    exec(compile(answer, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    text, metrics = shown.split("RequestMetrics")
    for part in re.findall(r"(\w+=\d+)[,.]", answer.partition("RequestMetrics")[2]):
        assert part in metrics
    for part in re.findall(r"`(Answer: .*?|The answer .*?)`", README):
        assert part in text
    exec(compile(stream, "README.md", "exec"), names)
    assert capsys.readouterr().out.strip() == text.strip()
    names["llm"].shutdown()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    args = shlex.split(command.replace("$'", "'"), comments=True)[1:]
    group: Any = get_command(app)
    while hasattr(group, "commands"):
        name = args.pop(0)
        group = group.commands[name]
    group.make_context(name, args)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 10
    assert all(hasattr(zipage, name) for name in re.findall(r"zipage\.([A-Z]\w+)", README))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def _anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings]
