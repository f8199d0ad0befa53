"""Every snippet in docs/rewards.md: configurations are valid, and functions score as documented, in real workers."""

from __future__ import annotations

import ast
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.config.load import validate
from services.config.verifiers import FUNCTION
from services.protocol.messages import Row
from services.verifiers.base import Job, Scores, combine, solved
from services.verifiers.builtin.simple import LengthVerifier
from services.verifiers.scoring import Scoring

PAGE = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8").split("\n## A service\n", 1)[0]
COMPLETIONS = ["<think>2 + 2</think><answer>\\boxed{4}</answer>", "It is 5.", "It is 5.", "4"]
ROW = msgspec.json.encode(Row([{"role": "user", "content": "2 + 2?"}], {"solution": "$4$"})).decode()
TOKEN = "not-a-real-token"

EXPECTED = {
    "score": [1, 0, 0, 1],
    "Vocabulary": [0, 2 / 3, 2 / 3, 0],
    "Classifier": [0.25] * 4,
    "shortest_first": [0.5, 0, 0, 1],
    "diversity": [1, 0.5, 0.5, 1],
    "longer": [1, 2, 3, 4],
    "well_formed": [1, 0, 0, 0],
    "accuracy": [1, 0, 0, 1],
}
"""Function on the page -> its expected scores for `COMPLETIONS`."""


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def configured(*snippets: str) -> list[dict[str, Any]]:
    return [verifier for text in snippets for verifier in tomllib.loads(text)["verifiers"]]


class ClassifierHandler(BaseHTTPRequestHandler):
    """The service that `Classifier` calls."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        known = text in COMPLETIONS and self.headers["Authorization"] == f"Bearer {TOKEN}"
        body = json.dumps({"probability": 0.25}).encode()
        self.send_response(200 if known else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def classifier() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), ClassifierHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def verifiers(folder: Path, classifier: str) -> list[dict[str, Any]]:
    """Return a verifier for each function on the page, configured as on the page or by name only."""
    (folder / "words.txt").write_text("it is\n")
    given = {
        verifier["function"].rpartition(":")[2]: verifier for verifier in configured(*snippets("toml")) if "function" in verifier
    }
    options = {"Vocabulary": {"path": str(folder / "words.txt")}, "Classifier": {"url": classifier}}
    found = []
    for i, text in enumerate(snippets("python")):
        (folder / f"snippet_{i}.py").write_text(text)
        (name,) = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        scope = "group" if "(completions" in text else "completion"
        found.append(
            {"kind": "python", "timeout_s": 60, "scope": scope, **given.pop(name, {}), "name": name}
            | {"function": f"{folder}/snippet_{i}.py:{name}"}
            | ({"options": options[name]} if name in options else {})
        )
    assert not given, "configured on the page, but not defined there"
    return found


async def scored(folder: Path, classifier: str) -> tuple[Scores, list[float], list[bool]]:
    config = config_of(verifiers(folder, classifier))
    tokens = [[7] * (i + 1) for i in range(len(COMPLETIONS))]
    scoring = Scoring(config, config.data.sources, workers=1)
    await scoring.start()
    try:
        found = await scoring.score(Job("main", COMPLETIONS, "4", ROW, ["stop"] * len(COMPLETIONS), tokens))
    finally:
        await scoring.close()
    return found, combine(found.scores, config.verifiers), solved(found.scores, config.thresholds("main"))


def config_of(verifiers: list[dict[str, Any]]) -> Any:
    sources = [{"kind": "jsonl", "path": "prompts.jsonl"}]
    return validate({"model": {"path": "m"}, "data": {"sources": sources}, "verifiers": verifiers}, "docs/rewards.md")


async def test_every_function_on_the_page_scores_as_documented(
    tmp_path: Path, classifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLASSIFIER_TOKEN", TOKEN)
    found, rewards, judged = await scored(tmp_path, classifier)
    assert {name: scores for name, scores in found.scores.items() if "." not in name} == EXPECTED
    assert found.scores["score.numbers"] == [3, 1, 1, 1]
    assert json.loads(found.notes[1])["score"]["why"] == "4 was expected"
    weights = {"score": 0.2, "diversity": 0.1}
    for i, reward in enumerate(rewards):
        assert reward == pytest.approx(sum(weights.get(name, 1) * scores[i] for name, scores in EXPECTED.items()))
    assert judged == [False] * 4, "none reaches the top of every declared range"


def test_the_pages_configurations_are_valid() -> None:
    for text in snippets("toml"):
        for verifier in config_of(configured(text)).verifiers:
            assert verifier.kind != "python" or FUNCTION.fullmatch(verifier.function)


def test_the_length_penalty_matches_the_pages_formula() -> None:
    (formula,) = re.findall(r"^    (-min\(.*\))$", PAGE, re.MULTILINE)
    (config,) = config_of([{"kind": "length", "soft_tokens": 8}]).verifiers
    verifier = LengthVerifier(config, 20)  # type: ignore[arg-type]
    for count in (0, 11, 12, 13, 16, 19, 20, 30):
        values = {"T": count, "max_tokens": 20, "soft_tokens": 8}
        assert verifier.score([7] * count) == eval(formula, values) <= 0
    assert verifier.score([7] * 16) == -0.5
