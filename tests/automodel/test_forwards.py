"""Changes to how modules run forward: recomputation, autocast, and no look for packed sequences."""

import copy
import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import modeling_flash_attention_utils as flash

from megatron_fsdp.automodel import FSDP2Manager, create_device_mesh
from megatron_fsdp.automodel.forwards import (
    assume_no_packed_sequences,
    checkpoint_layers,
    checkpoint_mlps,
    recompute_in_backward,
    run_under_autocast,
)
from tests.automodel.training import strategy
from tests.support.language_models import FAMILIES, batch_of, build
from tests.support.on_ranks import on_ranks


def gradients(model: Any) -> dict[str, Tensor]:
    batch = batch_of(2)
    model(**batch).loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("kind", ["llama_tied", "gpt2", "deepseek_v3"])
def test_gradients_are_bit_for_bit_those_without_recomputation(kind: str) -> None:
    plain = build(kind)
    expected = gradients(plain)
    for recompute in (checkpoint_layers, checkpoint_mlps, functools.partial(checkpoint_layers, is_selective=True)):
        model = build(kind)
        recompute(model)
        assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
        assert model.state_dict().keys() == plain.state_dict().keys()
        found = gradients(model)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kind", FAMILIES)
def test_mlps_of_every_family_are_found(kind: str) -> None:
    model = build(kind)
    checkpoint_mlps(model)
    assert sum("forward" in vars(part) for part in model.modules()) == 4


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(x * self.weight, 0.5, self.training).exp() * factor


def run(prepare: Callable[[nn.Module], None]) -> tuple[Counting, Tensor]:
    module = Counting()
    prepare(module)
    torch.manual_seed(3)
    module(torch.ones(3), factor=2.0).sum().backward()
    assert module.weight.grad is not None
    return module, module.weight.grad


def test_forward_runs_again_in_backward_with_the_same_random_numbers_and_else_once() -> None:
    plain, expected = run(lambda _: None)
    module, found = run(recompute_in_backward)
    assert (plain.calls, module.calls) == (1, 2)
    assert torch.equal(found, expected)
    with torch.no_grad():
        module(torch.ones(3))
    assert module.calls == 3
    module.eval()(torch.ones(3)).sum().backward()
    assert module.calls == 4
    run_under_autocast(module, "cpu", torch.bfloat16)
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)


def test_autocast_holds_inside_of_forward_only() -> None:
    module = nn.Linear(2, 2)
    run_under_autocast(module, "cpu", torch.bfloat16)
    assert module(torch.ones(1, 2)).dtype is torch.bfloat16
    assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_copy_of_a_module_computes_with_its_own_weights() -> None:
    module = Counting().eval()
    recompute_in_backward(module)
    run_under_autocast(module, "cpu", torch.bfloat16)
    reference = copy.deepcopy(module)
    with torch.no_grad():
        reference.weight.mul_(2.0)
    assert torch.equal(reference(torch.ones(3)), torch.full((3,), 2.0).exp())
    assert module.calls == 0


PACKED = torch.tensor([[0, 1, 2, 0, 1]])


def looks_packed() -> bool:
    return bool(flash._is_packed_sequence(PACKED, 1))


def test_look_is_left_out_while_one_of_the_models_lives_and_comes_back_afterwards() -> None:
    original, first, second = flash._is_packed_sequence, nn.Linear(1, 1), nn.Linear(1, 1)
    assert looks_packed()
    for model in (first, second, first):
        assume_no_packed_sequences(model)
    assert flash._is_packed_sequence(position_ids=PACKED, batch_size=1) is False
    del model, first
    gc.collect()
    assert flash._is_packed_sequence(PACKED, 1) is False
    del second
    gc.collect()
    assert flash._is_packed_sequence is original
    assert looks_packed()


def test_patch_of_somebody_else_above_ours_is_left_alone() -> None:
    original, model = flash._is_packed_sequence, nn.Linear(1, 1)
    assume_no_packed_sequences(model)

    def theirs(*_: Any, **__: Any) -> bool:
        return True

    flash._is_packed_sequence = theirs
    try:
        del model
        gc.collect()
        assert flash._is_packed_sequence is theirs
    finally:
        flash._is_packed_sequence = original


@on_ranks(1)
def test_flag_of_fsdp2_leaves_the_look_out() -> None:
    original: Any = flash._is_packed_sequence
    for flag in (False, True):
        config: Any = strategy("fsdp2", patch_is_packed_sequence=flag)
        mesh, _ = create_device_mesh(config)
        assert mesh is not None
        model = FSDP2Manager(config, mesh).parallelize(build("llama"))
        assert looks_packed() is (not flag)
        del model
        gc.collect()
        assert flash._is_packed_sequence is original
