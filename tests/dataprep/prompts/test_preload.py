"""The program that the chart runs downloads a model from a (local) hub into a folder that all pods share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.console import wait_until
from tests.support.preloading.starter import PLAIN
from tests.support.servers.hub import Hub

NAME = "owner/tiny"
CHUNK = 10 << 20  # size of the library's writes
WEIGHTS = os.urandom(24_000_000)
FILES = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": WEIGHTS, "nested/merges.txt": b"a b\n"}
HALF = CHUNK + 1_000_000


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(NAME, dict(FILES))
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the library an empty home folder, without a token."""
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("huggingface")))


def program(url: str, folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a download. It is not forked, because the library reads its environment on import."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    given |= {"HF_ENDPOINT": url, "HF_HOME": os.environ["HF_HOME"], PLAIN: "1"}
    return [sys.executable, "-m", "services.dataprep.prompts.preload", *(words or (NAME,)), str(folder)], given


def download(url: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv, environ = program(url, folder, *words)
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=100, check=False)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a model, without the library's metadata."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".cache/")}


def partials(folder: Path) -> list[Path]:
    return list(folder.parent.glob("*.partial"))


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a download, which is the last line, after any progress output."""
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_a_model_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "tiny"
    done = download(hub.url, folder)
    assert (done.returncode, done.stdout) == (0, f"{NAME} is in {folder}\n"), done.stderr
    assert content(folder) == FILES
    assert not partials(folder)
    hub.asked.clear()
    again = download(hub.url, folder)
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{folder} already exists\n", "")
    assert not hub.asked
    assert content(folder) == FILES


def size(path: Path) -> int:
    """Return the size of a file, or 0 if it has been renamed since."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def killed_halfway(hub: Hub, folder: Path) -> None:
    """Start a download and kill it when it has the small files and part of the weights."""

    def halfway() -> bool:
        begun = max(map(size, folder.parent.rglob("*.incomplete")), default=0)
        return begun >= CHUNK and sum(len(content(partial)) for partial in partials(folder)) == len(FILES) - 1

    hub.cut_after, hub.hold = HALF, True
    argv, environ = program(hub.url, folder)
    with subprocess.Popen(argv, env=environ, stderr=subprocess.DEVNULL) as process:
        wait_until(halfway)
        process.kill()
    hub.cut_after, hub.hold = None, False
    assert not folder.exists()
    assert partials(folder)


def test_a_partial_download_is_never_used_as_the_model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    killed_halfway(hub, folder)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "another pod"))
    for status in (503, 401, 404):  # without the hub, the library would return the folder unchanged
        hub.status = status
        assert download(hub.url, folder).returncode != 0
        assert not folder.exists(), status
    hub.status = 200
    done = download(hub.url, folder)
    assert done.returncode == 0, done.stderr
    assert content(folder) == FILES
    assert not partials(folder)


def test_a_killed_download_keeps_complete_files(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    killed_halfway(hub, folder)
    hub.asked.clear()
    assert download(hub.url, folder).returncode == 0
    fetched = [line for line in hub.asked if line.startswith("GET") and "/resolve/" in line]
    assert fetched == [f"GET /{NAME}/resolve/{hub.commit}/model.safetensors"]
    assert not list(folder.rglob("*.incomplete")), "partial files waste space"


def test_a_broken_connection_is_resumed(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    hub.cut_after = len(WEIGHTS) // 2
    assert download(hub.url, folder).returncode == 0
    assert any("model.safetensors bytes=" in line for line in hub.asked)
    assert content(folder) == FILES


def test_a_connection_that_keeps_breaking_leaves_no_model(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    hub.cut_after = 0
    done = download(hub.url, folder)
    assert done.returncode == 1
    assert error_of(done).startswith(f"error: {NAME} could not be downloaded whole: ")
    assert error_of(done).endswith("run it again to resume")
    assert not folder.exists()


def test_files_of_two_commits_are_not_mixed(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    other = tmp_path / f"tiny-2.{'a' * 12}.partial"  # left by the download of another model
    other.mkdir()
    killed_halfway(hub, folder)
    hub.commit, hub.files = "b" * 40, {"config.json": b"{}", "pytorch_model.bin": b"new"}
    assert download(hub.url, folder).returncode == 0
    assert content(folder) == hub.files
    assert partials(folder) == [other], "leftovers of the older commit waste space"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("not a name",), "'not a name' is not the name of a model on the hub, which is owner/name"),
        (("owner/other",), "owner/other is not on the hub, or is private or gated: correct the name, or set HF_TOKEN"),
        ((NAME, "--revision", "v9"), f"{NAME} has no revision 'v9': set a branch, tag or commit of it"),
    ],
)
def test_an_invalid_name_is_reported_on_one_line(words: tuple[str, ...], why: str, hub: Hub, tmp_path: Path) -> None:
    done = download(hub.url, tmp_path / "tiny", *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {why}")
    assert not list(tmp_path.glob("tiny*"))


def test_an_invalid_token_is_reported_on_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.status = 403
    done = download(hub.url, tmp_path / "tiny")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "set HF_TOKEN to a token that may" in done.stderr


def test_an_unusable_folder_is_reported_on_one_line(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file", "is a file, not a folder"), (tmp_path / "file" / "tiny", "correct model.path")):
        done = download(hub.url, folder)
        assert done.returncode == 2
        assert str(folder) in error_of(done)
        assert why in error_of(done)


def test_an_unreachable_hub_is_reported_on_one_line(tmp_path: Path) -> None:
    done = download("http://127.0.0.1:1", tmp_path / "tiny")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert f"{NAME} cannot be looked up on the hub" in done.stderr
    assert "check HF_ENDPOINT and the network" in done.stderr
