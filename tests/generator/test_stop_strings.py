"""`VllmEngine` on a real vLLM, with stop strings, which need a detokenizer, and after its end."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.generator.engines.vllm import VllmEngine
from services.groups.generated import SamplingParameters
from services.weights.receiver import EngineDead
from tests.support.models.tiny_vllm import make_config, make_model, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),  # loading vLLM takes minutes on a busy machine
    pytest.mark.filterwarnings("default"),  # importing vLLM warns
]

SPECIAL = [f"t{token}" for token in range(600, 900)]


async def test_a_stop_string_ends_a_completion(tmp_path: Path) -> None:
    make_model(tmp_path, tied=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(tmp_path)
    prompt = list(range(5, 17))
    engine = VllmEngine()
    await engine.start(make_config(tmp_path, sampling={"max_tokens": 192, "stop": ["unused"]}))
    try:
        expected = await engine.generate("plain", prompt, 5, SamplingParameters(40))
        word = f"t{expected.tokens[20]}"
        made = await engine.generate("stop", prompt, 5, SamplingParameters(40, stop=(f"{word} ",)))
        special = next(name for name in (f"t{token}" for token in expected.tokens) if name in SPECIAL)
        at_special = await engine.generate("special", prompt, 5, SamplingParameters(40, stop=(special,)))
        late = asyncio.create_task(engine.generate("late", prompt, 6, SamplingParameters(190)))
        await until(engine, "late", 2)
    finally:
        await engine.close()
    with pytest.raises(EngineDead):
        await late
    assert at_special.finish == "stop", "text without special tokens was searched"
    assert f"t{at_special.tokens[-1]}" == special
    assert at_special.tokens.tolist() == expected.tokens[: len(at_special.tokens)].tolist()
    assert made.finish == "stop"
    assert made.tokens.tolist() == expected.tokens[: len(made.tokens)].tolist()
    first = expected.tokens.tolist().index(expected.tokens[20])
    assert len(made.tokens) - (first + 1) in (0, 1)  # the space belongs to the next token
    with pytest.raises(EngineDead):
        await engine.generate("closed", prompt, 5, SamplingParameters(4))
    del late
    gc.collect()  # now, as collecting what vLLM leaves open warns
