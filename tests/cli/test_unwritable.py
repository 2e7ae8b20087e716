"""What commands do when their outputs can't be written: one line and exit code 1, no traceback."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.cli.invoke import Invocation, invoke
from zipage.cli.writing import check_writable

GOOD = '{"prompt_token_ids": [10, 20], "max_tokens": 2, "ignore_eos": true}'
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def generate(*args: str, stdin: str | None = None) -> Invocation:
    return invoke("generate", "--num-kv-blocks", "64", "--max-tokens", "2", *args, stdin=stdin)


@needs_full
@pytest.mark.parametrize(("option", "what"), [("--output", "the output"), ("--trace", "the trace")])
def test_full_disk(option: str, what: str) -> None:
    for result in (
        generate("hello", option, str(FULL)),
        generate("--format", "jsonl", option, str(FULL), stdin=f"{GOOD}\n{GOOD}"),
    ):
        assert result.exit_code == 1
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"Error: {what} can't be written: ")
        assert "No space left" in line


@needs_full
@pytest.mark.parametrize(
    "command",
    [("generate", "hello", "--num-kv-blocks", "64", "--max-tokens", "2"), ("info", "--json")],
)
def test_full_disk_behind_standard_output(command: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "zipage", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: the output can't be written: ")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("generate hello", "--output"),
        ("generate hello", "--trace"),
        ("bench offline", "--json"),
        ("bench ablation", "--json"),
        ("bench ablation --only base", "--plot"),
        ("bench serve", "--json"),
        ("eval", "--json"),
        ("eval", "--markdown"),
        ("demo", "--json"),
    ],
)
def test_results_that_cannot_be_written_are_told_before_the_work(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zipage.llm.LLM.__init__", None)  # any work would fail
    monkeypatch.chdir(tmp_path)
    Path("dir.svg").mkdir()
    for path, cause in (("no/x.svg", "there is no folder 'no'"), ("dir.svg", "it is a folder")):
        result = invoke(*command.split(), option, path)
        assert result.exit_code == 2
        assert f"{option}: {path!r} can't be written: {cause}" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "dir.svg"]


def test_results_that_are_not_permitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file that is there nor a new one in a folder; root may write everywhere."""
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.touch()
    for path, closed in ((old, old), (new, tmp_path)):
        monkeypatch.setattr(os, "access", lambda file, mode, closed=closed: file != closed)
        with pytest.raises(typer.BadParameter, match="that is not permitted"):
            check_writable("--json", path)
        check_writable("--json", new if path is old else old)


@pytest.mark.parametrize(
    ("command", "option", "other"),
    [
        ("eval", "--json", "--problems"),
        ("eval", "--markdown", "--problems"),
        ("eval", "--markdown", "--json"),
        ("bench serve", "--json", "--trace"),
        ("bench serve", "--json", "--prompts"),
        ("bench serve", "--plot", "--json"),
        ("bench ablation", "--plot", "--json"),
    ],
)
def test_results_do_not_overwrite_each_other_or_the_input(
    command: str, option: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    monkeypatch.setattr("zipage.llm.LLM.__init__", None)  # any work would fail
    monkeypatch.setattr("asyncio.run", None)
    monkeypatch.chdir(tmp_path)
    line = json.dumps(
        {"prompt": "x", "answer": "y", "arrival_s": 0, "input_tokens": 1, "output_tokens": 1}
    )
    Path("a.svg").write_text(line + "\n")
    result = invoke(*command.split(), option, "./a.svg", other, "a.svg")
    assert result.exit_code == 2
    assert f"{option}: 'a.svg' can't be written: it is the file of {other}" in result.stderr
    assert Path("a.svg").read_text() == line + "\n"


def test_the_null_device_may_take_everything() -> None:
    check_writable("--json", Path(os.devnull), {"--markdown": Path(os.devnull)})


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(typer.BadParameter, match=r"x\.json' can't be written: File name too long"):
        check_writable("--json", Path("x" * 300 + ".json"))


@pytest.mark.parametrize(
    ("module", "printed", "command"),
    [
        ("bench", "_print", "bench offline --num-requests 1 --output-len 2"),
        ("eval", "print_table", "eval --count 1 --min-tokens 0 --policies full --max-tokens 2"),
    ],
)
def test_results_are_written_though_nobody_reads_the_table(
    module: str, printed: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(f"zipage.cli.{module}.{printed}", leave)
    file = tmp_path / "results.json"
    result = invoke(*command.split(), "--num-kv-blocks", "64", "--json", str(file))
    assert result.exit_code == 1
    assert json.loads(file.read_text())["machine"]


@needs_full
def test_results_are_written_though_the_tables_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = invoke(
        *("eval", "--count", "1", "--min-tokens", "0", "--policies", "full", "--max-tokens", "2"),
        *("--num-kv-blocks", "64", "--markdown", str(FULL), "--json", str(file)),
    )
    assert result.exit_code == 1 and "No space left" in result.stderr
    assert json.loads(file.read_text())["cells"]


@needs_full
@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_full_disk_behind_an_evaluation(option: str) -> None:
    result = invoke(
        *("eval", "--count", "1", "--min-tokens", "0", "--policies", "full", "--max-tokens", "2"),
        *("--num-kv-blocks", "64", option, str(FULL)),
    )
    assert result.exit_code == 1 and "right," in result.stdout
    (line,) = result.stderr.splitlines()
    assert "can't be written" in line and "No space left" in line


def test_closed_standard_streams() -> None:
    program = "import sys; from zipage.cli import app; app(['generate', *sys.argv[1:]])"
    command = f'exec "{sys.executable}" -c "{program}"'
    for redirection, code, word in ((" hello >&-", 1, "output"), (" <&-", 2, "input")):
        ended = subprocess.run(
            ["sh", "-c", command + redirection], stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert ended.returncode == code
        assert f"the {word} can't be " in ended.stderr and "closed" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_outputs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("kept")
    link = tmp_path / "link"
    link.symlink_to(path)
    for trace in (path, link, tmp_path / "." / "out.json"):
        result = generate("hello", "--output", str(path), "--trace", str(trace))
        assert result.exit_code == 2 and "--trace" in result.stderr
    assert path.read_text() == "kept"


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_outputs_do_not_overwrite_the_input(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("in.jsonl")
    path.write_text(GOOD)
    Path("link.jsonl").symlink_to(path)
    for file in (str(path), "link.jsonl"):
        result = generate("--file", file, option, str(path))
        assert result.exit_code == 2
        assert f"{option}: 'in.jsonl' is what --file reads" in result.stderr
    assert path.read_text() == GOOD


@pytest.mark.parametrize("output", [[], ["--output", "-"]])
def test_trace_to_standard_output_is_refused(
    output: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = generate("hello", "--trace", "-", *output)
    assert result.exit_code == 2 and "the trace goes to a file" in result.stderr
    assert result.stdout == "" and list(tmp_path.iterdir()) == []


@needs_full
def test_full_disk_behind_results() -> None:
    result = invoke(
        "bench", "offline", "--num-kv-blocks", "64", "--num-requests", "1", "--output-len", "2",
        "--json", str(FULL),
    )  # fmt: skip
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"Error: {FULL} can't be written: ")
