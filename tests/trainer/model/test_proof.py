"""A model is verified before training, or rejected on loading with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import architectures, models_page, tiny_models
from services.config.root import Model
from services.config.training import Lora, Trainer
from services.trainer.model import configuration, logprobs, policy_network, proof
from services.trainer.model.attention import UnsupportedModel
from services.trainer.model.attention.packing import RowTokens
from services.trainer.model.proof import Proof, Proofs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: models this small are slower with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _load(folder: Path, known: Proofs | None = None, max_tokens: int = 256, **options: Any) -> policy_network.Scorer:
    config = Model(path=str(folder), dtype=options.pop("dtype", "float32"), max_tokens=max_tokens)
    return policy_network.load(config, 1.0, 16, proofs=known, **options)


def _saved(folder: Path, model_type: str, **changes: Any) -> Path:
    tiny_models.build(model_type, **changes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_verified_once(tiny_model: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 model is also verified in float32, with no larger gap; its weights are unchanged."""
    known = Proofs(tmp_path / "proofs")
    _load(tiny_model, known, dtype=dtype)
    (file,) = (tmp_path / "proofs").iterdir()
    found = [Proof(**figures) for figures in json.loads(file.read_text())]
    assert all(one.holds for one in found)
    assert [one.dtype for one in found] == [dtype, "float32"][: 2 if dtype == "bfloat16" else 1]
    assert found[-1].gap < 1e-4
    monkeypatch.setattr(proof, "alone", None)  # a second proof would raise
    scorer, plain = _load(tiny_model, known, dtype=dtype), _load(tiny_model, dtype=dtype)
    for one, other in zip(scorer.parameters(), plain.parameters(), strict=True):
        assert one.grad is None
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_other_weights_change_the_digest(tiny_model: Path) -> None:
    model = _load(tiny_model).model
    before = proof.digest(model, ("float32",))
    assert proof.digest(model, ("bfloat16",)) != before
    assert proof.digest(model, ("float32",)) == before
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert proof.digest(model, ("float32",)) != before


def test_other_code_changes_the_digest(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file.relative_to(Path(proof.__file__).parent).as_posix() for file in proof.computed_by()]
    assert {"attention/__init__.py", "attention/packing.py", "logprobs.py"} <= set(files)
    model = _load(tiny_model).model
    before = proof.digest(model, ())
    with monkeypatch.context() as patched:
        patched.setattr(proof, "computed_by", list)
        assert proof.digest(model, ()) != before
    monkeypatch.setattr(proof, "_gpu", lambda: "another GPU")
    assert proof.digest(model, ()) != before


def _scales(model: Any) -> None:
    """Compile into something else."""
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.5)


def _fails(*_: Any) -> None:
    raise RuntimeError("Failed to find C compiler.\nPlease specify it")


def _as_is(_: Any) -> None:
    """Compile nothing."""


FAILS_COMPILED = r"fails when it is compiled, set trainer\.compile = false: RuntimeError: Failed to find C compiler\.$"


@pytest.mark.parametrize(
    ("blocks", "head", "why"),
    [
        (
            _scales, logprobs._scored,
            r"gives different results in packed rows than alone when it is compiled: .*: set trainer\.compile = false",
        ),
        (_fails, logprobs._scored, FAILS_COMPILED),
        (_as_is, _fails, FAILS_COMPILED),
    ],
)  # fmt: skip
def test_a_compiled_model_is_proven_too(
    blocks: Callable[[Any], None], head: Callable[..., Any], why: str, tiny_model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(policy_network, "compile_blocks", blocks)
    monkeypatch.setattr(logprobs, "compiled_chunks", lambda: (head, logprobs._differentiated))
    with pytest.raises(UnsupportedModel, match=why):
        _load(tiny_model, Proofs(tmp_path / "wrong"), trainer=Trainer(compile=True))
    assert not (tmp_path / "wrong").exists()
    compiled: list[Any] = []
    monkeypatch.setattr(policy_network, "compile_blocks", compiled.append)
    monkeypatch.setattr(logprobs, "compiled_chunks", lambda: (logprobs._scored, logprobs._differentiated))
    _load(tiny_model, Proofs(tmp_path), trainer=Trainer(compile=True))
    (file,) = tmp_path.glob("*.json")
    assert [one["compiled"] for one in json.loads(file.read_text())] == [False, True]
    assert len(compiled) == 2, "for the proof, and with adapters"
    _load(tiny_model, Proofs(tmp_path), trainer=Trainer(compile=True))
    assert len(compiled) == 3


def test_an_unwritable_cache_only_costs_time(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    known = Proofs(tmp_path / "file" / "proofs")
    scorer, plain = _load(tiny_model, known), _load(tiny_model)
    for one, other in zip(scorer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (tmp_path / "file").is_file(), "nothing was cached"


def _no_memory_on_a_gpu(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def _no_memory_on_a_cpu(*_: Any) -> None:
    torch.empty(10**17)


@pytest.mark.parametrize("lack", [_no_memory_on_a_gpu, _no_memory_on_a_cpu])
def test_running_out_of_memory_is_not_blamed_on_the_model(
    lack: Callable[..., None], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "alone", lack)
    with pytest.raises((torch.OutOfMemoryError, RuntimeError), match=r"no memory|can't allocate memory"):
        _load(tiny_model, Proofs(tmp_path / "proofs"))


def test_a_failed_verification_is_reported_with_figures(tmp_path: Path) -> None:
    """Bloom encodes positions as biases of attention scores, which packed attention does not support."""
    with pytest.raises(UnsupportedModel, match=r"\(BloomForCausalLM\) gives different results .* up to [\d.]+ nats .* [\d.]+%"):
        _load(_saved(tmp_path / "model", "bloom"), Proofs(tmp_path / "proofs"))
    assert not (tmp_path / "proofs").exists(), "only valid proofs are cached"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_error_in_one_token_is_detected(tiny_model: Path, tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token has the position of the next: two logprobs change, by less than rounding to bfloat16 changes them."""
    exact = policy_network.Scorer._score

    def shifted(self: policy_network.Scorer, row: RowTokens) -> Any:
        positions = row.positions.clone()
        positions[-3] += 1
        return exact(self, replace(row, positions=positions))

    monkeypatch.setattr(policy_network.Scorer, "_score", shifted)
    with pytest.raises(UnsupportedModel, match=r"gives different results .* in float32"):
        _load(tiny_model, Proofs(tmp_path), dtype=dtype)


@pytest.mark.parametrize("loose", [0.3, float("inf"), float("nan")])
def test_gaps_beyond_rounding_are_rejected(loose: float) -> None:
    assert Proof(1e-5, 1e-5, 1e-6, 1e-6).holds
    assert not Proof(loose, 1e-5, 1e-6, 1e-6).holds
    assert not Proof(1e-5, loose, 1e-6, 1e-6).holds
    assert Proof(0.3, 1e-5, 0.1, 1e-6).holds, "rounding explains it"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("phimoe", "routes tokens to experts differently in training"),
        ("doge", "masks attention by its own values"),
        ("recurrent_gemma", "carries a recurrent state"),
        ("qwen3_next", r"layers of type \['linear_attention'\]"),
        ("gptj", "cannot be loaded as a causal language model for packed rows"),
    ],
)
def test_known_reasons_are_named(model_type: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        _load(_saved(tmp_path, model_type), Proofs(tmp_path / "proofs"))
    assert "\n" not in str(caught.value)


NOISY = {
    "opt": {"dropout": 0.4},
    "seed_oss": {"residual_dropout": 0.1, "attention_dropout": 0.1},
    "starcoder2": {"residual_dropout": 0.2, "embedding_dropout": 0.2},
    "mixtral": {"router_jitter_noise": 0.3},
}


@pytest.mark.parametrize("model_type", NOISY)
def test_dropout_is_off_but_exported_with_its_rates(model_type: str, tmp_path: Path) -> None:
    folder = _saved(tmp_path, model_type, **NOISY[model_type])
    scorer = _load(folder, Proofs(tmp_path / "proofs"))
    config = scorer.model.config
    assert {getattr(config, name) for name in NOISY[model_type]} == {0.0}
    with configuration.as_in_folder(config, str(folder)):
        assert {name: getattr(config, name) for name in NOISY[model_type]} == NOISY[model_type]
    assert {getattr(config, name) for name in NOISY[model_type]} == {0.0}


LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
}  # fmt: skip


@pytest.mark.parametrize(("max_tokens", "factors"), [(64, "short_factor"), (65, "long_factor")])
def test_long_rope_uses_the_engines_factors(max_tokens: int, factors: str, tmp_path: Path) -> None:
    """vLLM chooses them by its maximum length, transformers by the length of each row."""
    folder = _saved(tmp_path, "phi3", rope_parameters=LONG, original_max_position_embeddings=64)
    scorer = _load(folder, Proofs(tmp_path / "proofs"), max_tokens)
    rotary = scorer.model.model.rotary_emb
    exact = 1 / (torch.tensor(LONG[factors]) * 10000.0 ** (torch.arange(0, 16, 2) / 16))
    for length in (60, 100):
        rotary(torch.zeros(1), torch.arange(length)[None])
        torch.testing.assert_close(rotary.inv_freq, exact)


def test_rope_frequencies_that_depend_on_the_row_are_rejected(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match='rope_type = "dynamic"'):
        _load(_saved(tmp_path, "llama", rope_parameters=rope))


def test_fused_experts_are_not_skipped_silently(tmp_path: Path) -> None:
    folder = _saved(tmp_path, "qwen3_moe")
    with pytest.raises(UnsupportedModel, match=r"experts in fused parameters \(down_proj, gate_up_proj\).*lora\.targets"):
        _load(folder, adapters=Lora(rank=4))
    scorer = _load(folder, adapters=Lora(rank=4, targets=["q_proj"]))
    trained = {name.split(".lora_")[0].rpartition(".")[2] for name, p in scorer.named_parameters() if p.requires_grad}
    assert trained == {"q_proj"}


def test_a_target_of_fused_and_shared_experts_is_rejected(tmp_path: Path) -> None:
    folder = _saved(tmp_path, "qwen2_moe")
    with pytest.raises(UnsupportedModel, match=r"lora\.targets names \['down_proj'\].*remove them"):
        _load(folder, adapters=Lora(rank=4, targets=["down_proj", "q_proj"]))


LISTED = models_page.verdicts(models_page.PAGE.read_text(encoding="utf-8"))
"""Every type and its verdict in docs/models.md."""
SHARED_LAYERS = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::(transformers|torch)")  # about models' code in transformers, not about ours
@pytest.mark.parametrize(("model_type", "changes"), [*((name, {}) for name in LISTED), ("gemma4_text", SHARED_LAYERS)])
def test_the_models_page_states_each_verdict(model_type: str, changes: dict[str, Any]) -> None:
    found = architectures.try_out(model_type, **changes)
    assert (found.verdict, found.reason if found.verdict == "proven" else "") == (LISTED[model_type], "")


def test_every_type_is_on_the_models_page() -> None:
    assert LISTED.keys() == set(tiny_models.types())
    assert sum(verdict == "proven" for verdict in LISTED.values()) >= 90
    assert not {"silent", "crashed"} & set(LISTED.values())
