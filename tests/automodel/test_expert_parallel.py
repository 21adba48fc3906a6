"""How experts are dispatched, sharded and refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp import fully_shard_optimizer
from megatron_fsdp.automodel import MegatronFSDPManager, MoEParallelizerConfig, build_mesh_context, parallelize_model
from megatron_fsdp.automodel.expert_parallel import parallelize_experts, placement_of, shard_experts
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.training import (
    gradients_of,
    managed,
    optimizer_of,
    parameters_of,
    reference,
    strategy,
    train,
    whole,
)
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of
from tests.support.dcp_contents import assert_same_contents, contents, state_of
from tests.support.language_models import batch_of, build, label_count, token_loss_sum
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks, refusal

TOKENS, CHOSEN, NUM_EXPERTS, HIDDEN = 12, 2, 4, 32
NAME = "model.layers.0.mlp.experts"


def expert_mesh(ep: int) -> DeviceMesh:
    return mesh_of((dist.get_world_size() // ep, ep), ("ep_shard", "ep"))


_POLICIES: dict[str, Any] = {
    "mp_policy": MixedPrecisionPolicy(),
    "offload_policy": OffloadPolicy(),
    "reshard_after_forward": True,
}


class Sent(TorchDispatchMode):
    """Rows of each tensor that is sent to other ranks, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            sent = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)][-1]
            self.calls.append((name, sent.shape[0] if sent.ndim else 1, sent.is_floating_point()))
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
    by_rank = run_ranks(2, run_divided, shares)
    for share, first, second in zip(shares, *by_rank, strict=True):
        for again in (0, 1):
            for name in ("out", "tokens", "weights"):
                joined = torch.cat([first[again][name], second[again][name]])
                torch.testing.assert_close(joined, whole_run[name], rtol=1e-5, atol=1e-5, msg=f"{share} {name}")
            for name in ("gate_up_proj", "down_proj"):
                torch.testing.assert_close(first[again][name], whole_run[name], rtol=1e-5, atol=1e-5)
        for one, other in (first, second):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_a_layer_sends_counts_and_rows_twice_and_gradients_of_rows_twice(recompute: bool) -> None:
    model, tokens = build("mixtral", num_hidden_layers=2), batch_of()["input_ids"]
    parallelize_experts(model, expert_mesh(2)["ep"])
    if recompute:
        model.activation_checkpointing_enable()
    with Sent() as forward:
        loss = model(input_ids=tokens, use_cache=False).logits.sum()
    with Sent() as backward:
        loss.backward()
    kinds, again = (Counter((name, is_float) for name, _, is_float in sent.calls) for sent in (forward, backward))
    assert kinds == {("alltoall_base_", False): 2, ("all_to_all_single", True): 4}
    counts = {("alltoall_base_", False): 2} if recompute else {}
    assert again == {**counts, ("all_to_all_single", True): 8 if recompute else 4}
    by_rank, rows = of_ranks([count for _, count, is_float in forward.calls if is_float]), tokens.numel() * CHOSEN
    for layer in range(2):
        assert [sent[2 * layer] for sent in by_rank] == [rows, rows]
        assert sum(sent[2 * layer + 1] for sent in by_rank) == 2 * rows


@pytest.mark.parametrize(
    ("shape", "num_shards", "dim"),
    [((4, 6, 6), 2, 0), ((3, 6, 6), 2, 1), ((3, 5, 6), 2, 2), ((3, 5, 5), 2, 0), ((3, 5, 5), 1, 0), ((2, 8), 4, 1)],
)
def test_whole_experts_are_shared_out_if_they_divide_else_slices(
    shape: tuple[int, ...], num_shards: int, dim: int
) -> None:
    assert placement_of(torch.empty(shape), num_shards=num_shards) == Shard(dim)


@on_ranks(2)
def test_tokens_that_ranks_have_in_common_count_once() -> None:
    """Ranks that have the same tokens, as tensor-parallel ones have, send half of them each."""
    expected = reference("qwen2_moe", steps=1, changes={"num_hidden_layers": 2}).gradients[0]
    model, mesh, batch = build("qwen2_moe", num_hidden_layers=2), expert_mesh(2), batch_of()
    names = parallelize_experts(model, mesh["ep"], mesh["ep"])
    shard_experts(model, names, mesh["ep_shard"], **_POLICIES, gradient_divisor=1)
    with Sent() as forward:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    rows = [count for name, count, is_float in forward.calls if name == "all_to_all_single" and is_float]
    assert rows[::2] == [batch["input_ids"].numel() // 2 * CHOSEN] * 2
    (token_loss_sum(logits, batch["labels"]) / label_count(batch["labels"])).backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters()}
    assert_equal_tensors(found, expected, 1e-4, 1e-6)


@on_ranks(2)
def test_experts_compute_in_the_policys_dtype_and_routing_weights_keep_theirs() -> None:
    low, full = {torch.bfloat16}, {torch.float32}
    wanted = {"in": low, "routing": full, "out": low, "weights": low, "gradients": full, "parameters": full}
    mesh, seen = expert_mesh(2), {"in": set(), "routing": set(), "out": set(), "weights": set()}
    model = build("mixtral", num_hidden_layers=1)
    (name,) = parallelize_experts(model, mesh["ep"])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    options: dict[str, Any] = {"offload_policy": OffloadPolicy(), "reshard_after_forward": True}
    shard_experts(model, [name], mesh["ep_shard"], mp_policy=policy, gradient_divisor=2, **options)
    inner = replace(policy, output_dtype=None)
    fully_shard(model.model.layers[0], mesh=mesh_of((2,), ("dp_shard",)), mp_policy=inner)
    fully_shard(model, mesh=mesh_of((2,), ("dp_shard",)), mp_policy=policy)

    def look(part: nn.Module, args: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
        seen["in"].add(args[0].dtype)
        seen["routing"].add(args[2].dtype)
        seen["out"].add(out.dtype)
        seen["weights"] |= {param.dtype for param in part.parameters()}

    model.get_submodule(name).register_forward_hook(look, prepend=True)
    model(input_ids=batch_of(2)["input_ids"], use_cache=False).logits.sum().backward()
    gradients = {param.grad.dtype for param in model.get_submodule(name).parameters() if param.grad is not None}
    assert {
        **seen,
        "gradients": gradients,
        "parameters": {p.dtype for p in model.get_submodule(name).parameters()},
    } == wanted


def changed(change: Callable[[Any], object]) -> nn.Module:
    experts = build("mixtral", num_hidden_layers=1).get_submodule(NAME)
    change(experts)
    return nn.ModuleDict({"experts": experts})


def flatten(experts: nn.Module) -> None:
    for name, param in dict(experts.named_parameters()).items():
        experts.register_parameter(name, nn.Parameter(param.flatten(1)))


def cases() -> dict[str, nn.Module]:
    """Models that are refused, by a part of the message."""
    return {
        "LlamaForCausalLM has no module called experts": build("llama", num_hidden_layers=1),
        "has weights in modules of its own (norm.weight)": changed(
            lambda part: part.add_module("norm", nn.LayerNorm(3))
        ),
        "does not say num_experts": changed(lambda part: delattr(part, "num_experts")),
        "has a buffer (scale)": changed(lambda part: part.register_buffer("scale", torch.ones(4))),
        "has bias of shape (3,), which is not a row for each of its 4 experts": changed(
            lambda part: part.register_parameter("bias", nn.Parameter(torch.zeros(3)))
        ),
        "has no weight of three dimensions": changed(flatten),
        "is called as forward(hidden_states": changed(
            lambda part: setattr(part, "forward", lambda hidden_states: hidden_states)
        ),
        "top_k_weights, top_k_index": changed(
            lambda part: setattr(part, "forward", lambda hidden_states, top_k_weights, top_k_index: hidden_states)  # noqa: ARG005
        ),
        "has no weights": nn.ModuleDict({"experts": nn.Identity()}),
    }


@on_ranks(2)
def test_other_interfaces_are_refused_and_left_alone() -> None:
    mesh = expert_mesh(2)["ep"]
    for wanted, model in cases().items():
        before = [(name, type(part)) for name, part in model.named_modules()]
        message = refusal(parallelize_experts, model, mesh, error=ConfigurationError)
        assert [(name, type(part)) for name, part in model.named_modules()] == before
        assert wanted in message
        assert "\n" not in message


@on_ranks(2)
def test_sizes_and_repetitions_are_refused() -> None:
    mesh = expert_mesh(2)["ep"]
    for kind, name, number in (("mixtral", "num_local_experts", 3), ("qwen3_moe", "num_experts", 5)):
        odd = build(kind, num_hidden_layers=1, **{name: number})
        told = refusal(parallelize_experts, odd, mesh, error=ParallelSizeError)
        assert told.startswith(
            f"{NAME} has {number} experts (config.num_local_experts={number}), which ep_size=2 does not divide"
        )
    model = build("mixtral", num_hidden_layers=1)
    parallelize_experts(model, mesh)
    told = refusal(parallelize_experts, model, mesh)
    assert told.startswith(f"{NAME} (DividedMixtralExperts) has gate_up_proj divided over ranks already")


# ---- this package's engine -------------------------------------------------------------------------------------------


def on_engine(model: nn.Module, ep_size: int = 1, **fields: Any) -> Any:
    return managed(strategy("megatron_fsdp", **fields), model, ep_size=ep_size)


@on_ranks(2)
def test_the_engine_refuses_what_it_cannot_do_with_experts_on_all_ranks() -> None:
    with_buffer = build("mixtral", num_hidden_layers=1)
    with_buffer.get_submodule(NAME).register_buffer("scale", torch.ones(4))
    config = strategy("megatron_fsdp")
    for wanted, model, options in (
        ("LlamaForCausalLM has no module called experts", build("llama"), {}),
        (f"{NAME} (MixtralExperts) has a buffer (scale); expert parallelism needs", with_buffer, {}),
        (f"{NAME} has 3 experts (config.num_local", build("mixtral", num_hidden_layers=1, num_local_experts=3), {}),
        (
            "which tokens an expert computes together",
            build("mixtral"),
            {"deterministic": "world", "calculate_per_token_loss": True},
        ),
    ):
        message = refusal(on_engine, model, ep_size=2, **options)
        assert wanted in message
        assert "\n" not in message
    context = build_mesh_context(config, ep_size=2)
    meshes: Any = context.device_mesh, context.moe_mesh
    for options in ({"mp_policy": MixedPrecisionPolicy()}, {"reshard_after_forward": True}):
        told = refusal(MegatronFSDPManager, config, *meshes, MoEParallelizerConfig(**options))
        assert "moe_parallel_config sets mp_policy or reshard_after_forward, which are FSDP2's" in told
    model = build("mixtral")
    optimizer = torch.optim.SGD(model.parameters())
    manager = MegatronFSDPManager(config, *meshes)
    assert "an optimizer cannot be given with ep_size > 1" in refusal(manager.parallelize, model, optimizer)


@on_ranks(2)
def test_auxiliary_losses_are_means_over_ranks_of_those_of_their_own_tokens() -> None:
    options: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_hidden_layers": 1}
    plain = build("mixtral", **options)
    parts = [{name: each.chunk(2)[rank] for name, each in batch_of().items()} for rank in range(2)]
    for part in parts:
        (plain(**part, use_cache=False).loss / 2).backward()
    sharded = on_engine(build("mixtral", **options), 2)
    sharded(**parts[dist.get_rank()], use_cache=False).loss.backward()
    expected = {name: whole(param.grad) for name, param in plain.named_parameters() if param.grad is not None}
    assert_equal_tensors(gradients_of(sharded), expected, 1e-4, 1e-6)


@on_ranks(2)
def test_routers_are_kept_where_layers_are_recomputed_by_the_engine() -> None:
    flops = []
    for ignores in (False, True):
        context = build_mesh_context(strategy("megatron_fsdp", activation_checkpointing="full"), ep_size=2)
        context.moe_parallel_config = MoEParallelizerConfig(ignore_router_for_ac=ignores)
        model = parallelize_model(build("mixtral", num_hidden_layers=1), context)
        loss = model(**batch_of(), use_cache=False).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops.append(counter.get_total_flops())
    assert flops[1] < flops[0]


def saved_again(source: Path | None, target: Path, ep_size: int) -> list[float]:
    """Load what was saved, or train two steps; save it; and go on."""
    model = on_engine(build("qwen3_moe", seed=0 if source is None else 1, num_hidden_layers=2), ep_size)
    optimizer = optimizer_of(model)
    if source is None:
        train(model, optimizer=optimizer)
    else:
        assert load_checkpoint(model, optimizer, source, with_rng=False).is_complete
    dcp.save(state_of(model, optimizer), checkpoint_id=target)
    return train(model, optimizer=optimizer).losses


@pytest.mark.full
def test_experts_load_into_another_number_of_ranks_bit_for_bit(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("4 ranks", "2 ranks", "4 ranks again"))
    losses = [
        run_ranks(4, saved_again, None, first, 2)[0],
        run_ranks(2, saved_again, first, second, 1)[0],
        run_ranks(4, saved_again, second, third, 2)[0],
    ]
    expected = contents(str(first))
    assert expected["model.module.model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    assert_same_contents(contents(str(second)), expected)
    assert_same_contents(contents(str(third)), expected)
    torch.testing.assert_close(losses[1:], [losses[0]] * 2)


@pytest.mark.full
@on_ranks(4)
def test_muon_steps_each_expert_as_a_matrix_of_its_own() -> None:
    model, plain = (build("qwen3_moe", num_hidden_layers=1) for _ in range(2))
    sharded = on_engine(model, 2)
    params = dict(sharded.named_parameters())
    optimizer = torch.optim.Muon([value for name, value in params.items() if name.endswith("mlp.gate.weight")])
    optimizer.add_param_group({"params": [value for value in params.values() if value.ndim == 3]})
    fully_shard_optimizer(optimizer)
    sharded(input_ids=batch_of()["input_ids"], use_cache=False).logits.square().mean().backward()
    gradients = gradients_of(sharded)
    stacks = {name: param for name, param in plain.named_parameters() if param.ndim == 3}
    matrices = [nn.Parameter(matrix) for param in stacks.values() for matrix in param.detach()]
    for matrix, gradient in zip(matrices, (each for name in stacks for each in gradients[name]), strict=True):
        matrix.grad = gradient
    torch.optim.Muon(matrices).step()
    optimizer.step()
    found = parameters_of(sharded)
    assert_equal_tensors({name: found[name] for name in stacks}, stacks)
    assert not torch.equal(
        stacks[f"{NAME}.down_proj"], build("qwen3_moe", num_hidden_layers=1).get_parameter(f"{NAME}.down_proj")
    )
