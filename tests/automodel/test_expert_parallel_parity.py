"""Training with divided experts is training on one process: losses, every gradient and two updates."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel.expert_parallel import parallelize_experts, shard_experts
from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from tests.automodel.expert_parallel_training import (
    KINDS,
    Case,
    Trained,
    check_same,
    divide,
    expert_mesh,
    train_divided,
    train_whole,
)
from tests.automodel.small_models import Reference, batch_of, build, label_count, reference, token_loss_sum
from tests.automodel.training import whole
from tests.checkpoint.hf.hf_models import same_tensors, stored
from tests.conftest import RunRanks
from tests.support.parity import assert_equal_tensors

_TWO_LAYERS = {"num_hidden_layers": 2}


@cache
def _reference(kind: str) -> Reference:
    return reference(kind, steps=2, changes=_TWO_LAYERS)


def check_all(cases: list[Case], wanted: list[Reference | Trained]) -> None:
    """On a rank: run all cases."""
    for case, expected in zip(cases, wanted, strict=True):
        try:
            check_same(train_divided(case), expected)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.full(short=["qwen2_moe-2-2"])
@pytest.mark.parametrize(("num_ranks", "ep"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_train_as_on_one_process(run_ranks: RunRanks, kind: str, num_ranks: int, ep: int) -> None:
    run_ranks(num_ranks, check_all, [Case(kind, ep, changes=_TWO_LAYERS)], [_reference(kind)])


def only_experts_of_the_first_rank(model: Any) -> None:
    """Of DeepSeek's two groups of two experts the first is always chosen: that of rank 0 of 2."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:2] = 10.0


def never_the_last_expert(model: Any) -> None:
    """The last expert has no tokens; the other one of its rank may have some."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[3] = -10.0


def eager(model: Any) -> None:
    """Expert after expert, which is not what transformers does by default."""
    model.config._experts_implementation = "eager"


def eager_on_the_first_rank_only(model: Any) -> None:
    """Computed expert after expert, weights without tokens have no gradient, not even zeros."""
    only_experts_of_the_first_rank(model)
    eager(model)


def frozen_first_weight(model: Any) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("gate_up_proj" not in name)


EDGE_CASES = [
    Case("qwen3_moe", 2, rows=(3, 1), changes=_TWO_LAYERS),
    *(Case("mixtral", 2, changes=_TWO_LAYERS, recompute=way) for way in ("layers", "layers, reentrant", "blocks")),
    Case("deepseek_v3", 2, changes=_TWO_LAYERS, edit=only_experts_of_the_first_rank),
    Case("deepseek_v3", 2, changes=_TWO_LAYERS, edit=eager_on_the_first_rank_only, recompute="layers"),
    Case("deepseek_v3", 2, changes={**_TWO_LAYERS, "topk_group": 2}, edit=never_the_last_expert),
    Case("mixtral", 2, changes=_TWO_LAYERS, edit=eager),
    Case("qwen2_moe", 2, changes=_TWO_LAYERS, edit=frozen_first_weight),
]


_UNUSED = {
    only_experts_of_the_first_rank: [2, 3],
    eager_on_the_first_rank_only: [2, 3],
    never_the_last_expert: [3],
}


@pytest.mark.full
def test_uneven_and_empty_exchanges_and_recomputation_train_as_on_one_process(run_ranks: RunRanks) -> None:
    wanted = [train_whole(case) for case in EDGE_CASES]
    for case, expected in zip(EDGE_CASES, wanted, strict=True):
        unused = _UNUSED.get(case.edit, [])
        gradient = expected.gradients[0].get("model.layers.1.mlp.experts.down_proj")
        assert gradient is not None
        assert [e for e in range(4) if not gradient[e].any()] == unused
    run_ranks(2, check_all, EDGE_CASES, wanted)


@pytest.mark.full
def test_slices_of_experts_train_as_on_one_process(run_ranks: RunRanks) -> None:
    changes = {**_TWO_LAYERS, "num_experts": 6}  # 3 experts on each of 2 ranks are not shared out whole to 2 ranks
    case = Case("qwen3_moe", 2, changes=changes)
    run_ranks(4, check_all, [case], [reference("qwen3_moe", steps=2, changes=changes)])


def worst_gradients(case: Case, wanted: Reference) -> dict[str, float]:
    """How many times too large each gradient is."""
    found = train_divided(case).gradients[0]
    return {name: (found[name].norm() / wanted.gradients[0][name].norm()).item() for name in found}


def test_a_wrong_divisor_shows_in_expert_gradients_only(run_ranks: RunRanks) -> None:
    case = Case("mixtral", 2, changes=_TWO_LAYERS, divisor=1)
    ratios = run_ranks(2, worst_gradients, case, _reference("mixtral"))[0]
    for name, ratio in ratios.items():
        assert ratio == pytest.approx(2.0 if ".experts." in name else 1.0, rel=1e-3), name


def gradients_of_same_tokens() -> dict[str, torch.Tensor]:
    """Ranks that have the same tokens, as tensor-parallel ones have: only experts are divided."""
    model, mesh, batch = build("qwen2_moe", **_TWO_LAYERS), expert_mesh(2), batch_of()
    names = parallelize_experts(model, mesh["ep"])
    policies = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy(), "reshard_after_forward": True}
    shard_experts(model, names, mesh["ep_shard"], **policies, gradient_divisor=2)
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    (token_loss_sum(logits, batch["labels"]) / label_count(batch["labels"])).backward()
    assert {isinstance(p, DTensor) for name, p in model.named_parameters() if ".experts." in name} == {True}
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def test_tokens_that_ranks_have_in_common_count_once(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, gradients_of_same_tokens):
        assert_equal_tensors(found, _reference("qwen2_moe").gradients[0], rtol=1e-4, atol=1e-6)


_CHANGES = {
    "whole experts": {"num_hidden_layers": 2},
    "slices of experts": {"num_hidden_layers": 2, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6},
}
"""With 3 experts on each of 2 ranks, FSDP2 cannot give 2 ranks whole ones."""


def save_and_load(kind: str, ep: int, folder: str, changes: dict[str, int]) -> tuple[bool, bool]:
    """Save the divided model; load transformers' files into one that was made on the meta device."""
    model = build(kind, **changes)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    divide(model, ep)
    save_hf(model, f"{folder}/ours")
    with torch.device("meta"):
        blank = build(kind, **changes)
    divide(blank, ep)
    blank.to_empty(device="cpu")
    with torch.no_grad():
        for param in blank.parameters():
            param.fill_(7.0)
    report = load_hf(blank, f"{folder}/theirs")
    return report.is_complete, same_tensors(whole_parameters(blank), wanted)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.full(short=["mixtral-slices of experts"])
@pytest.mark.parametrize("cut", _CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_transformers(run_ranks: RunRanks, tmp_path: Path, kind: str, cut: str) -> None:
    build(kind, **_CHANGES[cut]).save_pretrained(tmp_path / "theirs")
    found = run_ranks(4, save_and_load, kind, 2, str(tmp_path), _CHANGES[cut])
    assert found == [(True, True)] * 4
    assert same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
