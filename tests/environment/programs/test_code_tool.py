"""The built-in tool `python`: any code that a model may write, in real processes, and what the code leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.config.environments import PythonEnvironment
from services.confined import folder
from services.confined.confine import OPEN_FILES_ALONE
from services.confined.scratch import remove
from services.environment.programs import code_runner as runner
from services.environment.programs.code_tool import CodeTool
from services.environment.programs.frames import ProgramSetup
from services.environment.programs.kinds import Conversing
from services.environment.programs.pool import ProgramPool
from services.runtime.own_code import Unusable
from tests.environment.programs.test_mcp import say
from tests.support.harness import wait_until

NOBODY = 65_534  # an unprivileged user


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeTool:
    monkeypatch.chdir(tmp_path)
    return CodeTool("0-0.1.0", 100.0)


async def run(tool: CodeTool, code: str) -> str:
    return await tool.call({"code": code})


async def test_code_keeps_files_but_no_variables(tool: CodeTool, tmp_path: Path) -> None:
    assert await run(tool, "x = 2\nprint(x)\nx + 1") == "2\n3"
    assert (await run(tool, "x")).endswith("NameError: name 'x' is not defined")
    assert await run(tool, "import json, os\nos.mkdir('d')\nopen('d/a', 'w').write(json.dumps([1]))") == "3"
    assert await run(tool, "open('d/a').read()") == "'[1]'"
    assert (await run(tool, "1 / 0")).endswith("ZeroDivisionError: division by zero")
    assert (await run(tool, "def (")).endswith("SyntaxError: invalid syntax")
    assert await tool.call({"code": 1}) == "Error: code: Input should be a valid string"
    other = CodeTool("0-0.1.1", 100.0)
    other.restore(tool.snapshot())
    assert await run(other, "open('d/a').read()") == "'[1]'"
    await tool.close()
    await other.close()
    assert os.listdir(tmp_path) == []
    assert await run(tool, "1") == "Error: the rollout has ended"


@pytest.mark.parametrize("leave", ["sys.exit", "os._exit"])
async def test_no_exit_status_of_the_code_is_taken_for_a_fault_of_the_machine(tool: CodeTool, leave: str) -> None:
    """Otherwise a policy could end a rollout without a reward."""
    for status in (1, 2, 3, 77):
        assert await run(tool, f"import os, sys\nprint('before', flush=True)\n{leave}({status})") == "before"
    assert await run(tool, f"import os, sys\n{leave}(3)") == ""
    await tool.close()


REFUSED = {
    "forks": "import os; os.fork()",
    "starts programs": "import subprocess; subprocess.run(['true'])",
    "becomes a program": "import os; os.execv('/bin/true', ['true'])",
    "starts threads": "import threading; threading.Thread(target=print).start()",
    "opens sockets": "import socket; socket.socket()",
    "opens pairs of sockets": "import socket; socket.socketpair()",
    "signals its parent": "import os; os.kill(os.getppid(), 9)",
    "asks the kernel to signal its parent": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 8, os.getppid())",
    "limits its parent": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
    "reads files": "open('/etc/passwd').read()",
    "reads its parent's variables": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "reads through links": "import os; os.symlink('/etc/passwd', 'link'); open('link').read()",
    "lists folders": "import os; os.listdir('/root')",
    "writes outside": "open('../outside', 'w')",
    "truncates what it may read": "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    "truncates by name": "import os; os.truncate(os.__file__, 0)",
    "changes modes": "import os; os.chmod('..', 0)",
    "keeps memory nowhere": "import os; os.memfd_create('x')",
    "leaves shared memory": "import ctypes, os\nif ctypes.CDLL(None).shmget(0, 4096, 0o1600) < 0: raise PermissionError('no')",
    "outlives its parent": "import ctypes\nif ctypes.CDLL(None).prctl(1, 0): raise PermissionError('no')",
    "queues signals": (
        "import ctypes, os, platform\nnumber = 129 if platform.machine() == 'x86_64' else 138\n"
        "if ctypes.CDLL(None).syscall(number, os.getppid(), 9, bytes(128)): raise PermissionError('no')"
    ),
}


async def test_hostile_code_is_blocked(tool: CodeTool, tmp_path: Path) -> None:
    library = os.stat(os.__file__)
    outputs = dict(zip(REFUSED, await asyncio.gather(*(run(tool, code) for code in REFUSED.values())), strict=True))
    allowed = {
        what: text for what, text in outputs.items() if "PermissionError" not in text and "can't start new thread" not in text
    }
    assert allowed == {}
    assert os.stat(os.__file__).st_size == library.st_size
    await tool.close()
    assert os.listdir(tmp_path) == []


TIMER = (
    "import ctypes, time\nlibrary = ctypes.CDLL(None)\nevent = (ctypes.c_int * 16)(0, 0, {signal}, 0)\n"
    "timer = ctypes.c_void_p()\nassert library.timer_create(1, event, ctypes.byref(timer)) == 0\n"
    "library.timer_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1000), None)\ntime.sleep(60)"
)
"""Code that lets a timer end its process with a signal, because it may not send one."""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True: pass", "Error: the code ran longer than 1 s"),
        ("import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)", "ran longer than 1 s"),
        ("while True: print('x' * 10_000)", "Error: the code printed more than 1 MiB"),
        ("x = bytearray(10 ** 9)", "MemoryError"),
        ("for i in range(20_000): open(f'{i}', 'w').close()", "10000 entries, all of them readable; it was emptied"),
        ("import os\nfor _ in range(20):\n    os.mkdir('d' * 250)\n    os.chdir('d' * 250)", "it was emptied"),
        ("for i in range(8):\n    with open(f'{i}', 'wb') as f: f.write(bytes(15 << 20))", "may have 64 MiB"),
        ("import os\nos.kill(os.getpid(), 9)", "PermissionError"),
        ("import ctypes; ctypes.string_at(0)", "Error: the code was killed by SIGSEGV (Segmentation fault)"),
        ("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (1, 9))\nwhile True: pass", "by SIGXCPU (CPU time limit exceeded)"),
        (TIMER.format(signal=40), "Error: the code was killed by signal 40"),
    ],
)
async def test_code_beyond_its_limits_is_stopped(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tool = CodeTool("0-0.2.0", 1.0 if "longer" in expected else 100.0)
    assert expected in await run(tool, code)
    tool._limit_s = 100.0
    assert await run(tool, "import os; len(os.listdir('.'))") == "0"
    await tool.close()


async def test_a_call_that_waits_too_long_for_others_is_answered(tool: CodeTool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait must not count as its own rollout's time, which it would exceed."""
    monkeypatch.setattr("services.environment.programs.code_tool._at_once", asyncio.Semaphore(1))
    other = CodeTool("0-0.1.1", 100.0, wait_limit_s=0.05)
    running = asyncio.create_task(run(tool, "import time; time.sleep(100)"))
    await wait_until(lambda: tool._process is not None)
    assert await run(other, "1 + 1") == "Error: not run, since other calls have kept the processors busy for 0.05 s: try again"
    await tool.close()
    await running
    other = Conversing(ProgramSetup("python", tools=["python"], timeout_s=200.0))._code("0-0.1.1")
    assert isinstance(other, CodeTool)
    assert other._wait_limit_s == 50.0
    assert await run(other, "1 + 1") == "2"
    await other.close()


UNPRIVILEGED = """
import asyncio, ctypes, os, sys
from services.environment.programs.code_tool import CodeTool
async def main():
    tool = CodeTool("0-0.1.0", 100.0)
    for code in sys.argv[2:]:
        print(await tool.call({"code": code}))
    await tool.close()
if sys.argv[1] == "begin":
    for capability in 1, 2:  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, with which no file mode keeps root out
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: the next program does not get it
    os.execv(sys.executable, [sys.executable, __file__, "go on", *sys.argv[2:]])
asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["0o300", "0o000"])
def test_a_folder_that_its_supervisor_cannot_read_is_over_the_limit(mode: str, tmp_path: Path) -> None:
    script, work = tmp_path / "script.py", tmp_path / "work"
    script.write_text(UNPRIVILEGED)
    work.mkdir()
    codes = [f"import os\nos.mkdir('h', {mode})", "import os; os.listdir('.')"]
    done = subprocess.run(
        [sys.executable, str(script), "begin", *codes], cwd=work, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first.endswith("it was emptied")
    assert second == "[]"
    assert os.listdir(work) == []


async def test_few_deleted_files_stay_open(tool: CodeTool) -> None:
    """They take space that the folder does not show."""
    opening = "while True: os.open('f', os.O_CREAT); os.unlink('f'); n += 1"
    code = f"import os\nn = 0\ntry:\n    {opening}\nexcept OSError: pass\nn"
    assert 20 < int(await run(tool, code)) < OPEN_FILES_ALONE
    await tool.close()


async def test_folders_of_any_depth_are_deleted_and_links_are_not_followed(tool: CodeTool, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    deep = "import os\nfor i in range(3000):\n    os.mkdir('d'); os.chdir('d')\nopen('end', 'w').close()"
    assert (await run(tool, deep)).endswith("it was emptied")
    assert await run(tool, "import os; os.symlink('../kept', 'link'); os.mkfifo('pipe')") == ""
    assert tool.snapshot() is None, "only plain files can be kept"
    assert await run(tool, "import os; os.unlink('pipe'); os.unlink('link'); open(b'\\xff', 'w').close()") == ""
    assert tool.snapshot() is None, "nor can a name that is not valid text"
    await tool.close()
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").exists()


def test_a_folder_that_cannot_be_read_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    if user == 0:  # no file mode keeps root out
        os.chown(tmp_path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    try:
        Path("code").mkdir()
        Path("code/file").write_text("x")
        assert folder.packed(Path("code")) is not None
        Path("code/closed").mkdir(mode=0)
        assert folder.packed(Path("code")) is None
    finally:
        os.seteuid(user)
        remove(Path("code"))


def named(text: str) -> list[int]:
    """Return the ids of the processes with this argument."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (proc / "cmdline").read_bytes().split(b"\0"):
                found.append(int(proc.name))
        except OSError:
            continue
    return found


def test_a_deep_leftover_folder_is_deleted(tmp_path: Path) -> None:
    place = os.getcwd()
    os.chdir(tmp_path)
    os.mkdir("top")
    os.chdir("top")
    for _ in range(1100):  # beyond Python's recursion limit
        os.mkdir("d", 0o500)
        os.chdir("d")
    os.chdir(place)
    remove(tmp_path / "top")
    remove(tmp_path / "absent")
    assert os.listdir(tmp_path) == []


@asynccontextmanager
async def pool(**keys: object) -> AsyncIterator[ProgramPool]:
    made = ProgramPool(PythonEnvironment.model_validate({"name": "code", "kind": "python", "tools": ["python"], **keys}))
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def test_a_resumed_rollout_keeps_the_tools_files() -> None:
    async with pool() as made, made.process() as process:
        started = (await process.do("a", "start", {})).value
        assert [tool["function"]["name"] for tool in started["tools"]] == ["python"]
        output, snapshot = await say(process, "a", "python", code="open('f', 'w').write('kept')")
        assert output == "4"
        await process.do("b", "restore", snapshot)
        assert (await say(process, "b", "python", code="open('f').read()"))[0] == "'kept'"
        assert (await process.do("a", "turn", {"content": "done"})).value["messages"] is None


POD = """
import asyncio, json, sys
from services.config.environments import PythonEnvironment
from services.environment.programs.pool import ProgramPool
from services.confined.scratch import remove
async def main():
    made = ProgramPool(PythonEnvironment(name="code", kind="python", tools=["python"], timeout_s=6000))
    await made.start()
    process = made.processes[0]
    await process.do("kill-9.0.0", "start", {})
    code = json.dumps({"code": "import time; print(1); time.sleep(600)"})
    call = {"id": "1", "function": {"name": "python", "arguments": code}}
    await process.do("kill-9.0.0", "turn", {"content": "", "tool_calls": [call]})
asyncio.run(main())
"""


async def test_a_killed_pod_leaves_nothing_behind(tmp_path: Path) -> None:
    pod = subprocess.Popen(  # noqa: ASYNC220 - returns once the process is forked
        [sys.executable, "-c", POD], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        await wait_until(lambda: named("code-kill-9.0.0"))
        [name] = os.listdir(tmp_path)
        scratch = tmp_path / name
        assert (scratch / "code-kill-9.0.0").is_dir()
    finally:
        pod.send_signal(signal.SIGKILL)
        pod.wait()
    await wait_until(lambda: not named("code-kill-9.0.0") and not named(str(scratch)))
    old = time.time() - 3600
    os.utime(scratch, (old, old))
    swept = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", "from services.confined.scratch import sweep; print(sweep())"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (swept.strip(), os.listdir(tmp_path)) == ("1", [])


@pytest.fixture
def unconfined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine that cannot confine code."""
    refusing = tmp_path / "runner.py"
    refusing.write_text(Path(runner.__file__).read_text().replace("if not confine_alone(", "if confine_alone("))
    monkeypatch.setattr(runner, "__file__", str(refusing))


@pytest.mark.usefixtures("unconfined")
async def test_a_machine_that_cannot_confine_code_runs_none(tool: CodeTool) -> None:
    with pytest.raises(Unusable, match=r"needs a kernel with seccomp and Landlock .*, or sandboxes of a cluster"):
        await run(tool, "1")
    await tool.close()
