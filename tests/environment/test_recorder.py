"""Exact tokens: what is marked as sampled is what the policy returned, after what it was given."""

from __future__ import annotations

import random

import pytest

from services.environment.recording.recorder import Recorder
from services.protocol import codec
from services.protocol.messages import Turn
from tests.environment.conversations import Program, exact_turns
from tests.environment.templates import FAMILIES, Family

TURNS = 100


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_trained_ids_are_sampled_ids(family: Family):
    exact = extended = turns = 0
    for seed in range(TURNS // 20):
        program = Program(family, random.Random(f"{family.name} {seed}"))
        for _ in range(20):
            program.turn()
        recorder = program.recorder
        exact += exact_turns(program.prompt, recorder.segments(), recorder.turns, program.policy.asked)
        turns += len(recorder.turns)
        extended += len(recorder.turns) - len(recorder.segments())
        restored = Recorder.restored(
            program.chat, program.prompt, program.start, [codec.decode(codec.encode(turn), Turn) for turn in recorder.turns]
        )
        assert restored.plan(program.messages, program.tools) == recorder.plan(program.messages, program.tools)
        assert codec.encode(restored.turns) == codec.encode(recorder.turns)
    print(family.name, extended / turns)
    assert exact == turns == TURNS
