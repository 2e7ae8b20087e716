"""The examples of docs/observability.md run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.observe.chrome_format import check_trace

PAGE = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=["numbers", "kept", "trace"])
def test_example(
    example: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "docs/observability.md", "exec"), names)
    shown = capsys.readouterr().out
    if "totals" in names:
        assert "('request-0', 'length'), ('request-1', 'length')" in shown
    elif "trace" in names:
        check_trace(json.loads(Path("trace.json").read_text(encoding="utf-8")))
    else:
        assert "80 -> 64 tokens" in shown
    names["llm"].shutdown()  # type: ignore[attr-defined]


def test_events_are_named_as_documented() -> None:
    source = (Path(__file__).parents[2] / "zipage" / "observe" / "trace.py").read_text()
    events = re.findall(r'self\._(?:instant|wait)\(lane, "([a-z ]+)"', source)
    events += re.findall(r'return "(waits[a-zA-Z ]+)"', source)
    assert len(events) >= 13
    assert [name for name in events if name not in PAGE] == []
