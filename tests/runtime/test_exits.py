"""The cause of a process's exit, from realistic logs of vLLM, DeepSpeed and our services."""

from __future__ import annotations

import json

from services.runtime.exits import LONGEST, cause, most_telling, one_line

ENGINE = """{"event": "Triton is not installed.", "level": "warning", "logger": "vllm.platforms.cpu"}
Process EngineCore:
(EngineCore pid=812) Traceback (most recent call last):
(EngineCore pid=812)   File "vllm/v1/engine/core.py", line 912, in run_engine_core
(EngineCore pid=812)     engine_core = EngineCoreProc(*args, **kwargs)
(EngineCore pid=812) ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "services/generator/pod.py", line 103, in _load
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
error: vLLM did not start: Engine core initialization failed. See root cause above. Failed core proc(s): {}
Exception ignored in: <function AsyncLLM.__del__ at 0x7f>
Traceback (most recent call last):
  File "vllm/v1/engine/async_llm.py", line 300, in __del__
TypeError: 'NoneType' object is not callable
"""


def test_an_error_that_refers_to_an_earlier_one_is_skipped() -> None:
    assert cause(ENGINE) == "ValueError: No available memory for the cache blocks."


def test_a_services_own_error_precedes_later_tracebacks() -> None:
    log = "error: path of source 'main' is not a file\nTraceback (most recent call last):\n  File x\nOSError: [Errno 9] closed\n"
    assert cause(log) == "path of source 'main' is not a file"


def test_tracebacks_of_warnings_are_not_causes() -> None:
    text = "Traceback (most recent call last):\n  File x\nTimeoutError: slow"
    recovered = json.dumps({"event": "loop failed, restarting it", "level": "warning", "exception": text})
    assert cause(f"{recovered}\n") == ""
    assert cause(json.dumps({"event": "failed", "level": "error", "exception": text})) == "TimeoutError: slow"
    assert cause(json.dumps({"event": "no space", "level": "error", "error": "disk full"})) == "no space: disk full"
    assert cause("\x00\xff{not JSON\n{]\n") == ""


def test_pydantic_errors_are_reduced_to_the_problem() -> None:
    text = (
        "vLLM rejects the configuration of the model or the generator: 1 validation error for VllmConfig\n"
        "  Value error, max_model_len (4096) is greater than 2048. [type=value_error, input_value=ArgsKwargs((), {})]\n"
        "    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
    )
    expected = "vLLM rejects the configuration of the model or the generator: max_model_len (4096) is greater than 2048."
    assert one_line(text) == expected
    assert cause(f"error: {text}\n") == expected


def test_a_message_is_one_bounded_line() -> None:
    assert one_line("CUDA out of memory.\n  Tried to\tallocate") == "CUDA out of memory. Tried to allocate"
    assert len(one_line("x" * 9999)) == LONGEST


def test_the_most_telling_rank_is_reported() -> None:
    assert (
        most_telling(["RuntimeError: Connection closed by peer", "torch.OutOfMemoryError: 2 GiB"])
        == "torch.OutOfMemoryError: 2 GiB"
    )
    lost, told = "RuntimeError: Connection closed by peer", "torch.OutOfMemoryError: 2 GiB"
    assert most_telling([lost, told]) == told
    assert most_telling(["", lost]) == lost
    assert most_telling([]) == ""
