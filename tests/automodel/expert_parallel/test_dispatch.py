"""What divided experts do with the tokens of one call, and what they send."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import RunRanks

pytest.importorskip("transformers")

from megatron_fsdp.automodel.expert_parallel import parallelize_experts
from tests.automodel.expert_parallel.training import expert_mesh, whole
from tests.automodel.small_models import batch_of, build
from tests.support.parity import fixed_seed

TOKENS, CHOSEN, NUM_EXPERTS, HIDDEN = 12, 2, 4, 32
NAME = "model.layers.0.mlp.experts"


class Sent(TorchDispatchMode):
    """Rows of each tensor that is sent to other ranks, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            sent = next(arg for arg in reversed(args) if isinstance(arg, Tensor))
            self.calls.append((name, len(sent), sent.is_floating_point()))
        return func(*args, **(kwargs or {}))


def routing() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, chosen experts, their weights: of all ranks together."""
    with fixed_seed(3):
        tokens, weights = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, CHOSEN)
        chosen = torch.stack([torch.randperm(NUM_EXPERTS)[:CHOSEN] for _ in range(TOKENS)])
    return tokens, chosen, weights


def run(experts: nn.Module, first: int, last: int) -> dict[str, Tensor]:
    """Output and gradients for some of the tokens."""
    tokens, chosen, weights = (value[first:last] for value in routing())
    tokens, weights = tokens.requires_grad_(), weights.requires_grad_()
    out = experts(tokens, chosen, weights)
    out.sin().sum().backward()
    found = {"out": out.detach(), "tokens": tokens.grad, "weights": weights.grad}
    found |= {name: whole(p.grad) for name, p in experts.named_parameters()}
    for param in experts.parameters():
        param.grad = None
    return found


def run_divided(shares: list[tuple[int, int]]) -> list[list[dict[str, Tensor]]]:
    """Twice for each share of rank 0, which may be none; rank 1 has the rest."""
    model = build("mixtral", num_hidden_layers=1)
    assert parallelize_experts(model, expert_mesh(2)["ep"]) == [NAME]
    experts = model.get_submodule(NAME)
    mine = [share if dist.get_rank() == 0 else (share[1], TOKENS) for share in shares]
    return [[run(experts, *share) for _ in range(2)] for share in mine]


def test_tokens_of_ranks_with_many_few_and_none_are_computed_as_together(run_ranks: RunRanks) -> None:
    whole_run = run(build("mixtral", num_hidden_layers=1).get_submodule(NAME), 0, TOKENS)
    shares = [(0, 6), (0, 11), (0, 0)]
    on_ranks = run_ranks(2, run_divided, shares)
    for share, first, second in zip(shares, *on_ranks, strict=True):
        for again in (0, 1):
            for name in ("out", "tokens", "weights"):
                joined = torch.cat([first[again][name], second[again][name]])
                torch.testing.assert_close(joined, whole_run[name], rtol=1e-5, atol=1e-5, msg=f"{share} {name}")
            for name in ("gate_up_proj", "down_proj"):
                torch.testing.assert_close(first[again][name], whole_run[name], rtol=1e-5, atol=1e-5)
        for one, other in (first, second):
            assert all(torch.equal(one[name], other[name]) for name in one)


def count_collectives(recompute: bool) -> tuple[list[Any], list[Any]]:
    model = build("mixtral", num_hidden_layers=2)
    parallelize_experts(model, expert_mesh(2)["ep"])
    if recompute:
        model.activation_checkpointing_enable()
    tokens = batch_of()["input_ids"]
    with Sent() as forward:
        loss = model(input_ids=tokens, use_cache=False).logits.sum()
    with Sent() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_sends_counts_and_rows_twice_and_gradients_of_rows_twice(run_ranks: RunRanks, recompute: bool) -> None:
    rows = batch_of()["input_ids"].numel() * CHOSEN
    found = run_ranks(2, count_collectives, recompute)
    for forward, backward in found:
        kinds = Counter((name, is_float) for name, _, is_float in forward)
        assert kinds == {("alltoall_base_", False): 2, ("all_to_all_single", True): 4}
        kinds = Counter((name, is_float) for name, _, is_float in backward)
        again = {("alltoall_base_", False): 2} if recompute else {}
        assert kinds == {**again, ("all_to_all_single", True): 8 if recompute else 4}
    for layer in range(2):
        sent = [[n for _, n, is_float in forward if is_float][2 * layer :][:2] for forward, _ in found]
        assert [first for first, _ in sent] == [rows, rows]
        assert sum(second for _, second in sent) == 2 * rows
