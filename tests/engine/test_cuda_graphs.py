"""`cuda_graph_mode`: steps that a CUDA graph can hold, since they do the same to the same memory."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from megatron_fsdp.optim.optimizer import check_capturable
from tests.conftest import RunRanks
from tests.engine.test_communication_pool import assert_steps_alike, recorded
from tests.optim.test_decoupled_grad import DecoupledSGD
from tests.support.arrangements import hybrid_arguments
from tests.support.on_ranks import on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_step

pytestmark = pytest.mark.unmerged

WIDTHS = (16, 24, 16)
FP32_SUMS = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


def shard(
    dtype: torch.dtype = torch.float32, device: str = "cpu", backend: Any = None, **given: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Tower(WIDTHS).to(device, dtype)
    for floor in model.floors if backend is not None else ():
        floor.compile(backend=backend, fullgraph=True)
    options = {"capturable": True} if device == "cuda" else {}
    is_decoupled = given.get("use_decoupled_grad", False)
    optimizer = DecoupledSGD(model.parameters()) if is_decoupled else torch.optim.AdamW(model.parameters(), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "cuda_graph_mode: .* nothing can be captured")
        return fully_shard(model, optimizer, fsdp_unit_modules=[Floor], **{"cuda_graph_mode": True, **given})


def batch(seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    draws = torch.Generator().manual_seed(17 * seed + dist.get_rank())
    return torch.randn(3, TOWER_FEATURES, generator=draws).to(device, dtype)


CASES: dict[str, tuple[int, torch.dtype, dict[str, Any]]] = {
    **{f"zero-{strategy}": (2, torch.float32, {"zero_dp_strategy": strategy}) for strategy in (0, 3)},
    "mixed": (2, torch.bfloat16, {"mixed_precision_policy": FP32_SUMS}),
    "decoupled": (2, torch.bfloat16, {"use_decoupled_grad": True}),
    "hfsdp": (4, torch.float32, {"outer_dp_sharding_strategy": "optim"}),
}


@pytest.mark.full(short=["zero-3", "decoupled", "hfsdp"])
@pytest.mark.parametrize(("name", "num_ranks"), [pytest.param(name, CASES[name][0], id=name) for name in CASES])
@on_ranks()
def test_steps_write_the_same_gradients_and_send_from_the_same_addresses(name: str, num_ranks: int) -> None:
    _, dtype, given = CASES[name]
    if num_ranks == 4:
        given = {**given, **hybrid_arguments(2, 2)}
    model, optimizer = shard(dtype, **given)
    attribute = "decoupled_grad" if name == "decoupled" else "grad"
    addresses = []

    def step(seed: int) -> None:
        tower_step(model, optimizer, batch(seed, dtype), 2)
        shown = [getattr(param, attribute).to_local() for param in model.parameters()]
        assert not any(grad.any() for grad in shown)
        addresses.append([grad.data_ptr() for grad in shown])

    assert_steps_alike(model, step)
    assert addresses[0] == addresses[1] == addresses[2] == addresses[3]


@pytest.mark.full
@on_ranks(2)
def test_units_that_torch_compiles_find_their_weights_at_the_same_addresses() -> None:
    """A graph of one unit, such as those of `backend="cudagraphs"`, reads its weights where it was captured."""
    found: list[list[int]] = []

    def recording(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:  # activations have three rows, and no weight does
            found[-1] += [x.data_ptr() for x in given if isinstance(x, torch.Tensor) and x.shape[:1] not in ((3,), ())]
            return graph(*given)

        return make_boxed_func(run)

    torch._dynamo.reset()
    # The compiler looks at `.grad` of every input, which torch itself warns of.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    model, optimizer = shard(backend=aot_autograd(fw_compiler=recording))
    losses = []
    for seed in range(4):
        found.append([])
        losses.append(tower_step(model, optimizer, batch(seed), 2))
    assert len(found[1]) >= 3 * 2 * (2 + 2)  # of three units, two microbatches: two in forward, two in backward
    assert found[1] == found[2] == found[3]
    plain, optimizer = shard(cuda_graph_mode=False)
    assert torch.equal(torch.stack(losses), torch.stack([tower_step(plain, optimizer, batch(n), 2) for n in range(4)]))


CHANGED_UNSEEN = [
    pytest.param(2, {"zero_dp_strategy": 1}, id="zero-1"),
    pytest.param(4, {"outer_dp_sharding_strategy": "optim"}, id="hfsdp"),
]


def nowhere_lacking() -> Any:
    return mock.patch("megatron_fsdp.wrap.shard_unit._no_capture_reason", return_value="")


@pytest.mark.parametrize(("num_ranks", "given"), CHANGED_UNSEEN)
@on_ranks()
def test_what_a_replay_has_changed_is_gathered_by_the_next_forward(num_ranks: int, given: dict[str, Any]) -> None:
    """A replay changes weights on the device; here they are changed behind the back of the host."""
    if num_ranks == 4:
        given = {**given, **hybrid_arguments(2, 2)}
    with nowhere_lacking():
        model, optimizer = shard(**given)
    tower_step(model, optimizer, batch(0))
    with torch.no_grad():
        model(batch(1))  # units stay gathered, which the captured step must not rely on
    with mock.patch("megatron_fsdp.engine.engine.is_capturing", return_value=True), recorded(model) as trace:
        tower_step(model, optimizer, batch(0))
    with recorded(model) as again:
        tower_step(model, optimizer, batch(0))
    assert [name for name, *_ in trace] == [name for name, *_ in again]
    x = torch.ones(3, TOWER_FEATURES)
    for _ in range(2):
        with torch.no_grad():
            model(x)
            for param in model.parameters():
                assert isinstance(param, DTensor)
                param._local_tensor.data.mul_(1.5)  # counts as no modification
            found = model(x)
        plain = Tower(WIDTHS)
        plain.load_state_dict(model.full_parameters())
        torch.testing.assert_close(found, plain(x))


@on_ranks(2)
def test_gradients_are_set_to_zero_where_they_are_whoever_clears_them() -> None:
    model, optimizer = shard()
    params = list(model.parameters())
    for clear in (optimizer.zero_grad, model.zero_grad, lambda: optimizer.zero_grad(set_to_none=True)):
        model(batch(0)).square().mean().backward()
        before = [param.grad for param in params]
        assert any(grad is not None and grad.to_local().any() for grad in before)
        clear()
        assert all(param.grad is grad for param, grad in zip(params, before, strict=True))
        assert not any(grad is not None and grad.to_local().any() for grad in before)


# ---- what is refused ------------------------------------------------------------------------------------------------

READS = [
    ({"report_nan_in_param_grad": True}, "report_nan_in_param_grad"),
    ({"find_unused_parameters": True}, "find_unused_parameters"),
    ({"verify_ranks": True}, "verify_ranks"),
    ({"mixed_precision_policy": MixedPrecisionPolicy(weight_format="fp8")}, "weight_format"),
]


@on_ranks(2)
def test_options_that_read_on_the_host_and_gradients_that_are_copies_are_refused() -> None:
    for given, name in READS:
        with pytest.raises(ConfigurationError, match=rf"cuda_graph_mode=True and {name} contradict each other"):
            shard(**given)
    with pytest.raises(ConfigurationError, match=r"main gradients of torch.bfloat16 parameters are torch.bfloat16"):
        shard(torch.bfloat16)


@on_ranks(2)
def test_a_capture_that_could_not_be_replayed_is_refused_where_it_begins() -> None:
    capturing = mock.patch("megatron_fsdp.engine.engine.is_capturing", return_value=True)
    model, optimizer = shard(cuda_graph_mode=False)
    with capturing, pytest.raises(ScheduleError, match="sharded without cuda_graph_mode=True"):
        model(batch(0))
    model, optimizer = shard()
    with capturing, pytest.raises(ScheduleError, match="cannot be captured here, since the model is on cpu"):
        model(batch(0))
    with nowhere_lacking():
        model, optimizer = shard()
    with capturing, pytest.raises(ScheduleError, match="before any step in which every parameter got a gradient"):
        model(batch(0))
    tower_step(model, optimizer, batch(0))
    with capturing:
        tower_step(model, optimizer, batch(1))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.AdamW, r"build it as AdamW\(\.\.\., capturable=True\)"),
        (AdamW8bit, "steps of AdamW8bit cannot be captured"),
        (torch.optim.Muon, "steps of Muon cannot be captured"),
        (lambda params: torch.optim.AdamW(params, capturable=True), ""),
        (lambda params: torch.optim.SGD(params, lr=0.1), ""),
    ],
)
def test_an_optimizer_that_counts_or_agrees_on_the_host_is_refused(make: Callable[..., Any], told: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(2, 2))])
    if not told:
        check_capturable(optimizer)
        return
    with pytest.raises(ConfigurationError, match=told):
        check_capturable(optimizer)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def captured(model: MegatronFSDP, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Run three steps, and capture a fourth: the graph, and where it writes its loss."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for seed in range(3):
            x.copy_(batch(seed, device="cuda"))
            tower_step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = tower_step(model, optimizer, x)
    return graph, loss


def replayed_and_stepped(strategy: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and weights of seven steps, four of them replayed, with an evaluation between them; and of all stepped."""
    found = []
    for replays in (True, False):
        model, optimizer = shard(device="cuda", zero_dp_strategy=strategy)
        x = batch(0, device="cuda")
        if replays:
            graph, loss = captured(model, optimizer, x)
        else:
            for seed in range(3):
                tower_step(model, optimizer, batch(seed, device="cuda"))
        losses = []
        for seed in range(3, 7):
            x.copy_(batch(seed, device="cuda"))
            if replays:
                graph.replay()
                losses.append(loss.clone())
            else:
                losses.append(tower_step(model, optimizer, x))
            with torch.no_grad():
                losses.append(model(x).sum())
        found.append([value.cpu().clone() for value in (*losses, *(param.to_local() for param in model.parameters()))])
    return found[0], found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", range(4))
def test_replayed_steps_are_the_steps(run_ranks: RunRanks, strategy: int) -> None:
    for replayed, stepped in run_ranks(torch.cuda.device_count(), replayed_and_stepped, strategy, device_type="cuda"):
        assert all(map(torch.equal, replayed, stepped))
