"""Compare an engine's weights with those loaded into it, with loaders like vLLM's and with a real vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from services.weights.receivers.loaded import LoadedWeights, compare
from tests.support.models.tiny_vllm import make_config, make_model, perturb


class Fused(torch.nn.Module):
    """Fuses two weights of the checkpoint, pads the third, and repacks the last."""

    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16), requires_grad=False)
        self.padded = torch.nn.Parameter(torch.empty(6, 4), requires_grad=False)
        self.packed = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            match name:
                case "q" | "k":
                    self.both.data.narrow(0, 4 * (name == "k"), 4).copy_(weight)
                case "embed":
                    self.padded[:5].data.copy_(weight)
                    self.padded[5:].data.fill_(0)
                case _:
                    assert self.packed.shape == weight.shape


def given() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(3)
    first = torch.randn(4, 4)  # rounded by the loader
    first[0, 0] = float("nan")
    return [("q", first), ("k", torch.randn(4, 4).bfloat16()), ("embed", torch.randn(5, 4)), ("packed", torch.randn(4, 4))]


def test_a_correctly_loaded_model_passes() -> None:
    model, weights = Fused(), given()
    model.load_weights(weights[:3])
    assert compare(model, weights) == LoadedWeights("", 3, 4)


@pytest.mark.parametrize(("tensor", "place", "name"), [("both", (3, 3), "q"), ("both", (4, 0), "k"), ("padded", (4, 3), "embed")])
def test_one_changed_bit_is_detected_and_nothing_written(tensor: str, place: tuple[int, int], name: str) -> None:
    model, weights = Fused(), given()
    model.load_weights(weights[:3])
    held = getattr(model, tensor).data
    held.view(torch.int16 if held.element_size() == 2 else torch.int32)[place] ^= 1
    before = {each: weight.clone() for each, weight in model.state_dict().items()}
    assert compare(model, weights).differs == name
    assert all(
        torch.equal(weight.view(torch.uint8), model.state_dict()[each].view(torch.uint8)) for each, weight in before.items()
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.filterwarnings("default")  # importing vLLM warns
async def test_an_engine_that_lost_a_weight_does_not_sample_with_it(tmp_path: Path) -> None:
    from services.generator.engines.vllm import VllmEngine
    from services.weights.receiver import TransferFailed, WeightsMisloaded
    from tests.weights.test_weight_transfer import Pair

    model = make_model(tmp_path, tied=False)
    worker = {"worker_extension_cls": "tests.weights.forgetful_worker.WorkerExtension"}
    generator = {"max_num_seqs": 32, "engine_options": worker}
    config = make_config(tmp_path, generator=generator, sync={"verify_loaded": True})
    engine = VllmEngine()
    await engine.start(config)
    try:
        pair = Pair(engine, model, config)
        await pair.make_group()
        for buffered in (False, True):
            await engine._llm.collective_rpc("forget_weight", args=("", buffered))
            perturb(model, 1)
            await pair.update()
            await pair.assert_equal()
        ((differs, compared, total),) = await engine._llm.collective_rpc("weights_loaded")
        assert differs == ""
        assert 0 < compared < total, "norms and embeddings; linear layers are repacked on a CPU"
        for buffered in (True, False, True):
            held = engine.version
            await engine._llm.collective_rpc("forget_weight", args=("model.norm.weight", buffered))
            perturb(model, 1)
            with pytest.raises(WeightsMisloaded, match=r"model\.norm\.weight"):
                await pair.update()
            assert (engine.version, engine.whole) == (held, False)
            with pytest.raises(TransferFailed, match="cannot resume"):
                await engine.resume()
            await engine._llm.collective_rpc("forget_weight", args=("", buffered))
            await pair.make_group()
            await pair.update()
            await pair.assert_equal()
        pair.sender.close_group()
    finally:
        await engine.close()
