"""Each flag of `FSDP2Config` has its effect, and numbers stay those of one process."""

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp.automodel import FSDP2Config
from tests.automodel.training import assert_trained_alike, managed, reference, strategy, train
from tests.support.language_models import batch_of, build
from tests.support.on_ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


def parallel(config: Any, kind: str = "llama", **sizes: int) -> Any:
    return managed(config, build(kind), **sizes)


def own_tokens() -> Tensor:
    return batch_of(4)["input_ids"].chunk(dist.get_world_size())[dist.get_rank()]


class Calls(TorchDispatchMode):
    """Collectives and matrix products in the block, with the dtype of their first tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("_reduce_scatter_base_", "_allgather_base_", "mm", "addmm"):
            self.seen.append((name, args[-1].dtype if name.endswith("mm") else args[1].dtype))
        return func(*args, **(kwargs or {}))

    def dtypes_of(self, name: str) -> set[torch.dtype]:
        return {dtype for seen, dtype in self.seen if seen == name}


@contextmanager
def counted(modules: dict[str, nn.Module]) -> Iterator[Counter[str]]:
    """How often the forwards of some modules begin in the block; recomputation may end before theirs do."""
    counts: Counter[str] = Counter()

    def note(name: str) -> Callable[..., None]:
        return lambda *_: counts.update([name])

    handles = [module.register_forward_pre_hook(note(name)) for name, module in modules.items()]
    yield counts
    for handle in handles:
        handle.remove()


def kept_bytes(model: Any) -> int:
    """Bytes that autograd keeps from one forward, views of the same memory counted once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        kept[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(input_ids=own_tokens(), use_cache=False).logits
    output.sum().backward()
    model.zero_grad()
    return sum(kept.values())


@on_ranks(2)
def test_activation_checkpointing_runs_layers_again_and_keeps_less() -> None:
    sizes, products = [], []
    for flag in (False, "selective", "full"):
        model = parallel(strategy("fsdp2", activation_checkpointing=flag))
        assert sorted(name for name, _ in model.named_parameters()) == sorted(dict(build("llama").named_parameters()))
        parts = {"attention": model.model.layers[0].self_attn, "mlp": model.model.layers[3].mlp}
        with counted(parts) as counts, Calls() as calls:
            sizes.append(kept_bytes(model))
        products.append(sum(name == "mm" for name, _ in calls.seen))
        assert counts == Counter(attention=1 + bool(flag), mlp=1 + bool(flag))
        with counted(parts) as counts, torch.no_grad():
            model(input_ids=own_tokens(), use_cache=False)
        assert counts == Counter(attention=1, mlp=1)
        assert_trained_alike(train(model), reference("llama"))
        assert model.config.use_cache is (not flag)
    assert sizes[2] < sizes[0] / 2
    assert products[0] < products[1] < products[2]


@on_ranks(2)
def test_layers_are_resharded_after_forward_as_told() -> None:
    for flag, gathered_after in ((None, [3]), (True, []), (False, [0, 1, 2, 3])):
        model = parallel(strategy("fsdp2", reshard_after_forward=flag))
        loss = model(input_ids=own_tokens(), use_cache=False).logits.sum()
        assert gathered(model) == gathered_after
        loss.backward()
        model.zero_grad()
        assert_trained_alike(train(model, steps=1), reference("llama", steps=1))


def ahead(model: Any, direction: str) -> list[list[int]]:
    """For each layer, the layers that FSDP2 is told to gather before it runs."""
    layers = list(model.model.layers)
    states = [layer._get_fsdp_state() for layer in layers]
    return [[states.index(other) for other in getattr(state, f"_states_to_{direction}_prefetch")] for state in states]


def gathered_in_forward(model: Any) -> list[list[int]]:
    """For each layer, the layers that are gathered or on their way when it computes."""
    found: list[list[int]] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_: found.append(gathered(model)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=own_tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def gathered(model: Any) -> list[int]:
    """Layers whose gathers have been started or are over, and that have not been given back."""
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in model.model.layers]
    return [index for index, group in enumerate(groups) if group.is_unsharded or group._all_gather_result is not None]


@on_ranks(2)
def test_prefetching_gathers_as_many_layers_ahead_as_asked_in_each_direction() -> None:
    none = [[], [], [], []]
    cases: list[tuple[dict[str, Any], list[list[int]], list[list[int]]]] = [
        ({}, none, none),
        ({"enable_fsdp2_prefetch": True}, [[1], [2], [3], []], [[], [0], [1, 0], [2, 1]]),
        (
            {"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 3, "fsdp2_backward_prefetch_depth": 1},
            [[1, 2, 3], [2, 3], [3], []],
            [[], [0], [1], [2]],
        ),
        ({"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": 0}, [[1], [2], [3], []], none),
        ({"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 0}, none, [[], [0], [1, 0], [2, 1]]),
    ]
    for fields, forward, backward in cases:
        model = parallel(strategy("fsdp2", **fields))
        assert ahead(model, "forward") == forward, fields
        assert ahead(model, "backward") == backward, fields
        assert gathered_in_forward(model) == [[index, *forward[index]] for index in range(4)], fields
    assert_trained_alike(train(model, steps=1), reference("llama", steps=1))


def dtypes(config: Any) -> dict[str, Any]:
    """What one step computes, communicates and keeps in."""
    model = parallel(config)
    seen: dict[str, Any] = {}
    layer = model.model.layers[0]
    inside = lambda module, args, output: seen.update(input=args[0].dtype, output=output.dtype)  # noqa: E731, ARG005
    handle = layer.mlp.up_proj.register_forward_hook(inside)
    with Calls() as calls:
        logits = model(input_ids=own_tokens(), use_cache=False).logits
        logits.float().sum().backward()
    handle.remove()
    param = next(layer.parameters())
    return {
        **seen,
        "logits": logits.dtype,
        "gathered": calls.dtypes_of("_allgather_base_"),
        "reduced": calls.dtypes_of("_reduce_scatter_base_"),
        "stored": (param.dtype, param.grad.dtype),
        "sharded": isinstance(model, FSDPModule) and type(param).__name__ == "DTensor",
    }


DEFAULT_DTYPES = {
    "input": BF16,
    "output": BF16,
    "logits": BF16,
    "gathered": {BF16},
    "reduced": {FP32},
    "stored": (FP32, FP32),
    "sharded": True,
}


POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)


@on_ranks(2)
def test_a_step_has_the_dtypes_of_the_policy() -> None:
    """That of the config by default, one that is given, plain float32, and that of autocast between float32 tensors."""
    assert dtypes(FSDP2Config(backend="gloo")) == DEFAULT_DTYPES
    reduced = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16, output_dtype=FP32)
    found = dtypes(FSDP2Config(backend="gloo", mp_policy=reduced))
    assert found == {**DEFAULT_DTYPES, "reduced": {BF16}, "logits": FP32}
    plain = {"input": FP32, "output": FP32, "logits": FP32, "gathered": {FP32}}
    assert dtypes(strategy("fsdp2")) == {**DEFAULT_DTYPES, **plain}
    found = dtypes(strategy("fsdp2", autocast_dtype=BF16))
    assert {**found, "logits": BF16} == {**DEFAULT_DTYPES, "input": FP32, "gathered": {FP32}}


@on_ranks(1)
def test_one_rank_has_the_dtypes_of_many() -> None:
    assert dtypes(FSDP2Config(backend="gloo")) | {"gathered": {BF16}, "reduced": {FP32}} == DEFAULT_DTYPES


@on_ranks(2)
def test_layers_hand_on_float32_only_where_autocast_lets_the_head_read_it() -> None:
    for autocast, handed_on in ((None, BF16), (BF16, FP32)):
        model, seen = parallel(FSDP2Config(backend="gloo", mp_policy=POLICY, autocast_dtype=autocast)), set()
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))  # noqa: ARG005, B023
        logits = model(input_ids=own_tokens(), use_cache=False).logits
        logits.float().sum().backward()
        assert (seen, logits.dtype) == ({handed_on}, FP32)


@on_ranks(2)
def test_autocast_holds_during_recomputation_and_ends_with_forward() -> None:
    """Recomputation runs under the same autocast: otherwise saved and recomputed tensors differ in dtype."""
    gradients = []
    for flag in (False, "selective", "full"):
        model = parallel(strategy("fsdp2", autocast_dtype=BF16, activation_checkpointing=flag))
        gradients.append(train(model, steps=1).gradients[0])
    assert not torch.is_autocast_enabled("cpu")
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=0, atol=0)


def fsdp_params(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_group.fsdp_params)


@on_ranks(2)
def test_offloading_keeps_shards_on_the_host_and_trains_the_same() -> None:
    for policy in (None, CPUOffloadPolicy(pin_memory=False)):
        model = parallel(strategy("fsdp2", offload_policy=policy))
        params = [p for m in model.modules() if isinstance(m, FSDPModule) for p in fsdp_params(m)]
        assert len(params) == len(list(model.parameters()))
        assert {param.offload_to_cpu for param in params} == {policy is not None}
        assert_trained_alike(train(model), reference("llama"))


@contextmanager
def traced_only() -> Iterator[None]:
    """Let `torch.compile` trace as ever and run the traced operators as they are: C++ would take minutes."""
    compiles: Any = torch.compile
    torch.compile = functools.partial(compiles, backend="aot_eager")  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's compiler looks at what torch itself warns of
            yield
    finally:
        torch.compile = compiles
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.mark.full
@on_ranks(2)
def test_compiled_layers_share_one_graph_and_train_the_same_under_the_same_names() -> None:
    graphs = []
    for fields in ({}, {"activation_checkpointing": True}):
        with traced_only():
            model = parallel(strategy("fsdp2", enable_compile=True, **fields))
            names = [name for name, _ in model.named_parameters()]
            assert names == [name for name, _ in build("llama").named_parameters()]
            assert_trained_alike(train(model, steps=2), reference("llama", steps=2))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 1]
