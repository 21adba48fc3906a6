"""What a model is after its tensors were divided; tests/automodel/test_parity.py trains it."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of
from tests.support.language_models import FAMILIES, batch_of, build
from tests.support.on_ranks import on_ranks

SIZES = {"num_hidden_layers": 2}


def divided(kind: str) -> list[str]:
    """What is wrong with the parameters of a divided model, with and without sequence parallelism."""
    wrong = []
    mesh = mesh_of((2,), ("tp",))
    for splits_tokens in (False, True):
        model = build(kind, **SIZES)
        tied = sum(1 for _ in model.parameters())
        parallelize_tensors(model, mesh, sequence_parallel=splits_tokens)
        model(**batch_of()).loss.backward()
        params = dict(model.named_parameters())
        wrong += [f"{name} is plain" for name, param in params.items() if not isinstance(param, DTensor)]
        wrong += [] if len(params) == tied else ["weights are not tied any more"]
        wrong += [
            f"{name} has a gradient placed as {param.grad.placements}"
            for name, param in params.items()
            if param.grad is not None and param.grad.placements != param.placements
        ]
    return wrong


@pytest.mark.full(short=["llama_tied", "deepseek_v3"])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
def test_every_parameter_is_a_dtensor_with_a_gradient_placed_alike(run_ranks: RunRanks, kind: str) -> None:
    assert run_ranks(2, divided, kind) == [[], []]


@on_ranks(2)
def test_experts_without_tokens_get_a_gradient_of_zero() -> None:
    """One token for two experts of four: some rank's experts get none."""
    wrong = []
    mesh = mesh_of((2,), ("tp",))
    gradients = []
    for divided in (False, True):
        model = build("mixtral", **SIZES)
        model.config._experts_implementation = "eager"
        if divided:
            parallelize_tensors(model, mesh)
        model(input_ids=batch_of()["input_ids"][:1, :1], use_cache=False).logits.square().mean().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, right in gradients[0].items():
        mine = gradients[1][name]
        if (right is None) != (mine is None) or not torch.allclose(mine.full_tensor(), right, rtol=1e-4, atol=1e-6):
            wrong.append(name)
    assert wrong == []


@on_ranks(2)
def test_a_model_on_the_meta_device_is_divided_alike() -> None:
    wrong = []
    mesh = mesh_of((2,), ("tp",))
    for kind in ("gemma3", "deepseek_v3", "phi3"):
        models = [build(kind, **SIZES), build(kind, **SIZES).to("meta")]
        for model in models:
            model.tie_weights()
            parallelize_tensors(model, mesh, sequence_parallel=True)
        real, meta = (dict(model.named_parameters()) for model in models)
        wrong += [] if real.keys() == meta.keys() else [f"{kind}: other names"]
        for name, param in meta.items():
            same = param.placements == real[name].placements and param.shape == real[name].shape
            if not param.is_meta or not same or param.to_local().shape != real[name].to_local().shape:
                wrong.append(f"{kind}: {name}")
    assert wrong == []


@on_ranks(2)
def test_gradients_are_clipped_by_torch_as_on_one_process() -> None:
    norms = []
    mesh = mesh_of((2,), ("tp",))
    for divided in (True, False):
        model = build("qwen3_moe", **SIZES)
        if divided:
            parallelize_tensors(model, mesh, sequence_parallel=True)
        model(**batch_of()).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norms.append(float(norm.full_tensor() if divided else norm))
    found, expected = norms[0], norms[1]
    assert found == pytest.approx(expected, rel=1e-5)
