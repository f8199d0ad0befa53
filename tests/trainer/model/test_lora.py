"""Adapters: real DeepSpeed ranks against a float64 twin and against peft, when trained, sent, exported and saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.config import ConfigError
from services.config.loss import Loss
from services.config.training import Lora
from services.protocol.messages import RankPlan
from services.trainer.checkpoints import exporting
from services.trainer.model import lora
from services.trainer.model import policy_network as model
from services.trainer.model.logprobs import token_logprobs
from services.trainer.step import batches
from services.trainer.step import deepspeed_engine as engine
from tests.support.checkpoints import checked
from tests.support.models.rank_worker import Job, launch
from tests.support.models.tiny_model import VOCABULARY, make_config, make_model, make_payloads, make_samples
from tests.trainer import literal, loss_variants

OPTIONS = {"rank": 4, "alpha": 6.0}
SCALE = 1.5
STEP: dict[int, Any] = {1: [[[[3, 1, 0, 2], [5, 4, 6, 7]]]], 2: [[[[3, 1, 0, 2]], [[5, 4, 6, 7]]]]}
"""Two rows, on one rank or on two."""
LOSS = {"policy": "reinforce", "kl_beta": 0.1, "correction_upper": 1.99}
JOBS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "alone": (1, {"deterministic": True}, {}),
    "bfloat16 alone": (1, {"deterministic": True}, {"dtype": "bfloat16"}),
    "tied": (1, {}, {"path": "tied"}),
    "attention only": (1, {"gradient_checkpointing": True}, {}),
    "two": (2, {"deterministic": True}, {}),
    "bfloat16 two": (2, {"deterministic": True}, {"dtype": "bfloat16"}),
    "sequence": (2, {"sequence_parallel": 2}, {}),
    "zero1": (2, {"zero_stage": 1}, {}),
    "zero2 offload": (2, {"zero_stage": 2, "offload": True, "gradient_checkpointing": True}, {}),
    "zero3": (2, {"zero_stage": 3}, {}),
    "zero3 offload": (2, {"zero_stage": 3, "offload": True, "gradient_checkpointing": True}, {}),
    "bfloat16 zero3": (2, {"zero_stage": 3}, {"dtype": "bfloat16"}),
}
"""Number of ranks, and changes to the sections `trainer` and `model`."""
ATTENTION = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"tied": make_model(tmp_path_factory.mktemp("tied"), tied=True), "": tiny_model}


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results of every job, one per rank, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("lora")
    payloads = make_payloads(groups=2, size=4)
    given = {"payloads": payloads, "samples": make_samples(payloads)}
    jobs: dict[int, dict[str, Job]] = {1: {}, 2: {}}
    for name, (ranks, trainer, of_model) in JOBS.items():
        path = models[of_model.get("path", "")]
        wide = trainer.get("sequence_parallel", 1)
        sections = {
            "trainer": {"row_tokens": 128} | trainer,
            "model": {"dtype": "float32", "max_tokens": 256} | of_model | {"path": str(path)},
            "lora": OPTIONS | ({"targets": ATTENTION} if name == "attention only" else {}),
            "loss": LOSS,
            "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
        }
        arguments = {"model": path, "sections": sections, "layouts": [STEP[ranks // wide]] * 2, "root": folder / name}
        jobs[ranks][name] = "lora", given | arguments
    found: dict[str, list[Any]] = {"folder": [folder]}
    for ranks, named in jobs.items():
        outcome = launch(ranks, list(named.values()), folder / f"ranks-{ranks}")
        found |= dict(zip(named, outcome, strict=True))
    return found


def _base(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace(".base_layer.", "."): value for name, value in weights.items() if ".lora_" not in name}


def _adapters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if ".lora_" in name}


def _loaded(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).state_dict()


def _model_of(name: str, models: dict[str, Path]) -> tuple[Path, str]:
    of_model = JOBS[name][2]
    return models[of_model.get("path", "")], of_model.get("dtype", "float32")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_only_adapters_are_trained(name: str, models: dict[str, Path], results: dict[str, list[Any]]) -> None:
    before = _loaded(*_model_of(name, models))
    for result in results[name]:
        first, middle, last = result["weights"]
        for weights in (first, middle, last, *result["resumed"]["weights"]):
            assert _base(weights).keys() == before.keys()
            assert all(torch.equal(value, before[key]) for key, value in _base(weights).items())
        layers = 2 * (2 if name == "attention only" else 7)
        adapters = _adapters(last)
        assert len(adapters) == 2 * layers
        assert {value.dtype for value in adapters.values()} == {torch.float32}
        moved = {key for key, value in adapters.items() if not torch.equal(value, _adapters(middle)[key])}
        assert moved == result["gradients"][1].keys() == adapters.keys()
        assert all(torch.equal(value, results[name][0]["weights"][2][key]) for key, value in adapters.items())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name in JOBS if "bfloat16" not in name])
def test_adapter_gradients_match_the_formula(name: str, models: dict[str, Path], results: dict[str, list[Any]]) -> None:
    """The twin has full weights only; the chain rule turns its gradient of W + s B A into those of B and A."""
    result = results[name][0]
    payloads = make_payloads(groups=2, size=4)
    given = payloads, make_samples(payloads)
    adapted, found = loss_variants.responses(results["folder"][0] / name / "export", *given)
    references = [one.theta.detach() for one in loss_variants.responses(_model_of(name, models)[0], *given)[1]]
    found = [replace(one, reference=reference) for one, reference in zip(found, references, strict=True)]
    literal.objective(found, Loss.model_validate(LOSS)).backward()
    whole = {key: weight.grad for key, weight in adapted.named_parameters()}
    weights, gradients = result["weights"][1], result["gradients"][1]
    for key, gradient in gradients.items():
        layer = key.rpartition(".lora_")[0]
        a, b = (weights[layer + matrix].double() for matrix in lora.MATRICES)
        of_weight = whole[f"{layer}.weight"]
        expected = SCALE * (b.T @ of_weight if key.endswith(lora.MATRICES[0]) else of_weight @ a.T)
        assert float((gradient.double() - expected).abs().max() / expected.abs().max()) < 1e-4, key
    kl = result["metrics"][1]["kl/train/mean"]
    assert result["metrics"][0]["kl/train/mean"] == 0, "before the first step the policy is its reference"
    assert abs(kl) > 1e-4
    assert results["alone"][0]["metrics"][1]["kl/train/mean"] == pytest.approx(kl, rel=1e-3) or name in ("tied", "attention only")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_sent_and_exported_weights_match_pefts_merge(name: str, models: dict[str, Path], results: dict[str, list[Any]]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path, dtype = _model_of(name, models)
    export = results["folder"][0] / name / "export"
    base = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    expected = PeftModel.from_pretrained(base, str(export / "adapter")).merge_and_unload().state_dict()
    received, exported = results[name][0]["received"], _loaded(export, dtype)
    weights = results[name][0]["weights"][1]
    assert received.keys() == exported.keys() == expected.keys()
    assert "lm_head.weight" in received, "tied or not"
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-24
    for key, value in expected.items():
        assert torch.equal(received[key], exported[key])
        layer, change = key.removesuffix(".weight"), 0.0
        if layer + lora.MATRICES[0] in weights:
            a, b = (weights[layer + matrix].to(getattr(torch, dtype)).double() for matrix in lora.MATRICES)
            exact = weights[f"{layer}.base_layer.weight"].double() + SCALE * b @ a
            change = float((SCALE * b.abs() @ a.abs()).max())
            assert not torch.equal(exact.to(received[key].dtype), weights[f"{layer}.base_layer.weight"])
            torch.testing.assert_close(received[key].double(), exact, rtol=rounding + 1e-6, atol=1e-6)  # rounded once
        # peft does not round A and B to the model's dtype first
        torch.testing.assert_close(received[key], value, rtol=2 * rounding + 1e-6, atol=1e-6 + 2 * rounding * change)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_an_export_of_the_checkpoint_equals_that_of_the_run(
    name: str, models: dict[str, Path], results: dict[str, list[Any]], tmp_path: Path
) -> None:
    path, dtype = _model_of(name, models)
    targets = {"targets": ATTENTION} if name == "attention only" else {}
    config = make_config(path, model={"dtype": dtype}, lora=OPTIONS | targets)
    folder = results["folder"][0] / name
    assert exporting.write(config, folder / "checkpoints", None, tmp_path / "export").step == 0
    written, expected = (checked(one) for one in (tmp_path / "export", folder / "export"))
    assert written == expected, "every file is bitwise equal"
    named = json.loads((tmp_path / "export" / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert named == sorted(named), "not in the order of a set, which is another one in each process"
    assert "local" not in (tmp_path / "export" / "tokenizer_config.json").read_text(), "nothing of how it was loaded"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", JOBS)
def test_resumed_equals_uninterrupted_bitwise(name: str, results: dict[str, list[Any]]) -> None:
    for result in results[name]:
        resumed = result["resumed"]
        for ours, theirs in zip(resumed["weights"], result["weights"][1:], strict=True):
            assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
        uninterrupted = result["metrics"][1]
        assert {key for key, value in resumed["metrics"].items() if value != uninterrupted[key]} <= {
            key for key in uninterrupted if key.startswith("time/")
        }


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["", "bfloat16 "])
def test_results_are_bitwise_equal_on_any_number_of_ranks(dtype: str, results: dict[str, list[Any]]) -> None:
    first, *others = results[f"{dtype}alone"] + results[f"{dtype}two"]
    for other in others:
        assert all(torch.equal(value, other["weights"][2][key]) for key, value in first["weights"][2].items())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_checkpoint_omits_frozen_weights(models: dict[str, Path], results: dict[str, list[Any]]) -> None:
    weights = results["attention only"][0]["weights"][1]
    saved = sum(file.stat().st_size for file in (results["folder"][0] / "attention only" / "checkpoints").rglob("*.pt"))
    assert saved < sum(value.nbytes for value in _base(weights).values())


def _scorers(path: Path, dtype: str, **options: Any) -> tuple[Any, Any]:
    """Return the model without adapters, and with them."""
    config = make_config(path, model={"dtype": dtype}, lora=OPTIONS | options)
    return model.load(config.model, 0.7, 5), model.load(config.model, 0.7, 5, adapters=config.lora)


def _row() -> batches.Row:
    payloads = make_payloads(groups=1, size=4)
    return batches.build(RankPlan([make_samples(payloads)]), payloads, vocabulary=VOCABULARY, row_tokens=128)[0]


def _score(scorer: Any) -> torch.Tensor:
    row = _row()
    with torch.no_grad():
        return scorer(row)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_adapted_model_starts_as_its_own_reference(dtype: str, tiny_model: Path) -> None:
    plain, adapted = _scorers(tiny_model, dtype)
    expected = _score(plain)
    assert torch.equal(_score(adapted), expected)
    for name, weight in adapted.named_parameters():
        if name.endswith(lora.MATRICES):
            assert weight.dtype == torch.float32
            torch.nn.init.normal_(weight)
    assert not torch.equal(_score(adapted), expected)
    assert torch.equal(_score(lora.Unadapted(adapted)), expected)
    assert not torch.equal(_score(adapted), expected), "the adapters are back"


def test_the_optimizer_gets_only_adapters(tiny_model: Path) -> None:
    config = make_config(tiny_model, lora=OPTIONS, optimizer={"weight_decay": 0.1})
    scorer = model.load(config.model, 1.0, 8, adapters=config.lora)
    (group,) = engine.adamw(config, scorer).param_groups
    assert group["weight_decay"] == 0.1
    assert {id(weight) for weight in group["params"]} == {
        id(weight) for name, weight in scorer.named_parameters() if name.endswith(lora.MATRICES)
    }


def test_parameter_names_are_those_of_the_base_model() -> None:
    layer = "model.layers.0.self_attn.q_proj"
    own = [f"{layer}.base_layer.weight", f"{layer}.base_layer.bias", "model.norm.weight"]
    adapter = [f"{layer}.lora_A.default.weight", f"{layer}.lora_B.default.weight"]
    assert lora.sources([own[0], *adapter, *own[1:]]) == {
        f"{layer}.weight": (own[0], *adapter),
        f"{layer}.bias": (own[1],),
        "model.norm.weight": (own[2],),
    }
    assert lora.sources(["lm_head.weight"]) == {"lm_head.weight": ("lm_head.weight",)}


def test_a_frozen_output_matrix_gets_no_gradient() -> None:
    hidden, weight, targets = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3), torch.arange(5)
    gradients = []
    for matrix in (weight, weight.clone().requires_grad_()):
        logprobs, _ = token_logprobs(hidden, matrix, targets, 0.7, 2)
        gradients.append(torch.autograd.grad(logprobs.sum(), hidden)[0])
        assert logprobs.grad_fn is not None
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"alpha": 8.0}}, r"lora\.alpha = 8\.0 has no effect with lora\.rank = 0: set lora\.rank, or remove it"),
        ({"lora": OPTIONS, "reference": {"alpha": 0.1}}, r"lora\.rank = 4 and reference\.alpha = 0\.1 are incompatible"),
    ],
)
def test_incompatible_settings_are_rejected(sections: dict[str, Any], message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(tiny_model, **sections)


def test_a_target_missing_from_the_model_is_named(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets names \['lm_head', 'qkv'\], which model\.path = .* lacks: .*down_proj"):
        _scorers(tiny_model, "float32", targets=["q_proj", "qkv", "lm_head"])


def test_scale_is_alpha_over_rank() -> None:
    assert Lora(rank=4, alpha=6.0).scale == SCALE  # pyright: ignore[reportCallIssue]


def test_a_model_without_linear_layers_is_rejected() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    transformer = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64))
    with pytest.raises(ConfigError, match=r"lora\.rank = 4: model\.path = 'gpt2' has no linear layers .*: set lora\.rank = 0"):
        lora.attach(transformer, Lora(rank=4), "gpt2")
