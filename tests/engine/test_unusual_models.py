"""Models that reach their parameters in unusual ways train as on one process, or are refused by name."""

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, ScheduleError, ShardOperationError
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid_arguments
from tests.support.parity import assert_equal_tensors, fixed_seed

WIDTH = 6


class Recurrent(nn.Module):
    """Recurrent layers keep a list of their weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1).expand(-1, 3, -1)
        for block in self.blocks:
            x, _ = block(x)
        return x[:, -1]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class BackwardOnAThread(torch.autograd.Function):
    """Calls a module, and runs its backward on a thread of its own, as autograd does for a graph on two devices."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.autograd.backward, ctx.y, grads).result()
        return None, ctx.x.grad


class Threaded(Layers):
    def forward(self, x: Tensor) -> Tensor:
        first, second, *_ = self.layers
        return second(BackwardOnAThread.apply(first, x))  # type: ignore[no-untyped-call]


class ReturnsWeight(nn.Module):
    """Hands out a view of its own weight, which is used when other units have been gathered into the same slot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.linear.weight.t()


class UsesReturned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReturnsWeight() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        weights = []
        for layer in self.layers:
            x, weight = layer(x)
            weights.append(weight)
        return sum((x @ weight for weight in weights), start=x)


class Prompt(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList([Prompt(), Prompt()])
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        first, second = (prompt() for prompt in self.prompts)
        return self.layers(x) @ first + x @ second


class Masked(Layers):
    """Half of the gradient of one weight is masked by a hook that was registered before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight.register_hook(_mask)


def _mask(grad: Tensor) -> Tensor:
    return grad * (torch.arange(grad.numel()) % 2).view_as(grad)


class Strided(Layers):
    """Parameters that do not lie contiguous in memory: every other column, every other element, real parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.layers[0].bias = nn.Parameter(torch.randn(2 * WIDTH)[::2])
        self.layers[1].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).real)


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def penalised_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty on parameters, each rank on its shards; its gradient does not come through any unit."""
    local = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return F.mse_loss(model(x), y) + 0.1 * sum((piece**2).sum() for piece in local)


def globally_penalised_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same by reductions over the ranks: every rank adds the whole penalty, as one process does."""
    return F.mse_loss(model(x), y) + 0.1 * sum((param**2).sum() for param in model.parameters())


def loss_times_numbers(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Numbers made of parameters, and a whole one, meet data outside of the forward, so gradients differ by rank."""
    first, second, third, fourth = (layer.weight for layer in _layers(model))
    whole = fourth.full_tensor() if isinstance(fourth, DTensor) else fourth
    error = F.mse_loss(model(x) @ whole / torch.linalg.vector_norm(third, keepdim=True).reshape(()), y)
    norms = torch.stack([param.norm() for param in model.parameters()])
    return error * (first**2).sum() / norms.norm() + error * second.max() * 0.1 * (second**2).sum()


def _layers(model: nn.Module) -> nn.ModuleList:
    return (model.module if isinstance(model, MegatronFSDP) else model).layers  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    units: tuple[type[nn.Module], ...]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = plain_loss


CASES = {
    "recurrent": Case(Recurrent, (nn.LSTM,)),
    "penalty": Case(Layers, (nn.Linear,), penalised_loss),
    "global penalty": Case(Layers, (nn.Linear,), globally_penalised_loss),
    "numbers times data": Case(Layers, (nn.Linear,), loss_times_numbers),
    "returned view": Case(UsesReturned, (ReturnsWeight,)),
    "returned parameter": Case(Prompted, (Prompt, nn.Linear)),
    "gradient hook": Case(Masked, (nn.Linear,)),
    "strided": Case(Strided, (nn.Linear,)),
}


HYBRID = -1
"""In the place of a strategy: 3 on 2 x 2 ranks."""


def _wrap(
    model: nn.Module, units: tuple[type[nn.Module], ...], strategy: int
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments = hybrid_arguments(2, 2) if strategy == HYBRID else {"zero_dp_strategy": strategy}
    return fully_shard(model, optimizer, fsdp_unit_modules=list(units), **arguments)


def train(name: str, strategy: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients and weights of three steps of two microbatches, sharded and on one process."""
    case = CASES[name]
    with fixed_seed(0):
        reference = case.build()
    with fixed_seed(0):
        model, optimizer = _wrap(case.build(), case.units, strategy)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    pairs = []
    for step in range(3):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x, y = (torch.randn(12, WIDTH, generator=generator) for _ in range(2))
            case.loss(reference, x, y).backward()
            rank, ranks = dist.get_rank(), dist.get_world_size()
            case.loss(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]).backward()
        found = {key: grad for key, grad in model.full_gradients().items() if grad is not None}
        pairs.append((found, {key: param.grad.clone() for key, param in reference.named_parameters()}))
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
        pairs.append((model.full_parameters(), copy.deepcopy(dict(reference.named_parameters()))))
    return pairs


# On 3 ranks shards are cut inside rows.
RUNS = [(name, *setting) for name in CASES for setting in [(2, 0), (2, 1), (2, 3), (3, 3)]]
RUNS.append(("numbers times data", 4, HYBRID))


@pytest.mark.full(cover=1)
@pytest.mark.parametrize(("name", "num_ranks", "strategy"), RUNS)
def test_trains_as_one_process(run_ranks: RunRanks, name: str, num_ranks: int, strategy: int) -> None:
    for pairs in run_ranks(num_ranks, train, name, strategy):
        for found, wanted in pairs:
            assert_equal_tensors(found, wanted, rtol=1e-5, atol=1e-6)


def sum_with_numbers(strategy: int) -> tuple[float, str]:
    """With gradients that are summed: how wrong that of a penalty is, and what is said of a number times data."""
    with fixed_seed(0):
        reference = Layers()
        model = fully_shard_model(
            copy.deepcopy(reference),
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=strategy,
            calculate_per_token_loss=True,
        )
    x, y = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(0))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    globally_penalised_loss(reference, x, y).backward()
    mine = plain_loss(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]) / ranks
    (mine + 0.1 * sum((param**2).sum() for param in model.parameters())).backward()
    found = model.full_gradients()
    worst = max((found[name] - param.grad).abs().max().item() for name, param in reference.named_parameters())
    with pytest.raises(ShardOperationError) as raised:
        (
            plain_loss(model, x.chunk(ranks)[rank], y.chunk(ranks)[rank]) * model.module.layers[0].weight.norm()
        ).backward()
    return worst, str(raised.value)


@pytest.mark.parametrize("strategy", [0, 3])
def test_what_summed_gradients_mean_for_a_number_is_not_guessed(run_ranks: RunRanks, strategy: int) -> None:
    for worst, message in run_ranks(2, sum_with_numbers, strategy):
        assert worst < 1e-6
        assert message.startswith("ranks have different gradients for a number or a whole tensor that was made of")


def mix_units(strategy: int) -> str:
    """Each rank calls another layer."""
    with fixed_seed(0):
        model, _ = _wrap(Layers(), (nn.Linear,), strategy)
    layers = model.module.layers
    del layers[2 + dist.get_rank() :]
    del layers[1 : 1 + dist.get_rank()]
    with pytest.raises(ScheduleError) as raised:
        plain_loss(model, torch.ones(2, WIDTH), torch.ones(2, WIDTH)).backward()
    return str(raised.value)


@pytest.mark.parametrize("strategy", [1, 3])
def test_ranks_that_call_different_units_are_found(run_ranks: RunRanks, strategy: int) -> None:
    first, second = run_ranks(2, mix_units, strategy)
    assert first == second
    assert first.startswith("ranks gathered or reduced different units")


def _refusal(
    use: Callable[[MegatronFSDP, torch.optim.Optimizer], object],
    strategy: int = 3,
    build: Callable[[], nn.Module] = Layers,
) -> str:
    with fixed_seed(0):
        model, optimizer = _wrap(build(), (nn.Linear,), strategy)
    with pytest.raises((ConfigurationError, ScheduleError)) as raised:
        use(model, optimizer)
    return str(raised.value)


X = torch.ones(2, WIDTH)


def call_with_other_weights() -> str:
    return _refusal(lambda m, _: torch.func.functional_call(m, {k: p.detach() for k, p in m.named_parameters()}, (X,)))


def replace_data() -> str:
    def use(model: MegatronFSDP, _: torch.optim.Optimizer) -> None:
        param = model.module.layers[2].weight
        model(X)
        param._local_tensor = torch.zeros_like(param._local_tensor)
        model(X)

    return _refusal(use)


def write_in_forward() -> str:
    def use(model: MegatronFSDP, _: torch.optim.Optimizer) -> None:
        def clamp(layer: nn.Module, _args: object) -> None:
            with torch.no_grad():
                layer.weight.clamp_(-0.1, 0.1)

        model.module.layers[1].register_forward_pre_hook(clamp)
        model(X)

    return _refusal(use)


def differentiate_twice() -> str:
    return _refusal(lambda m, _: m(X).sum().backward(create_graph=True), 0)


def differentiate_on_two_threads() -> str:
    return _refusal(lambda m, _: m(X.clone().requires_grad_()).sum().backward(), build=Threaded)


def copy_deeply() -> str:
    return _refusal(lambda m, _: copy.deepcopy(m))


def pickle_it() -> str:
    return _refusal(lambda m, _: torch.save(m, io.BytesIO()))


def shard_lazy() -> str:
    return _refusal(lambda _m, _o: fully_shard_model(nn.Sequential(nn.LazyLinear(3))))


def use_fused_sgd() -> str:
    return _refusal(lambda m, _: fully_shard_optimizer(torch.optim.SGD(m.parameters(), lr=0.1, fused=True)))


REFUSALS = {
    call_with_other_weights: "weight of a Linear in unit layers.0 is not the sharded parameter any more",
    replace_data: "the data of layers.2.weight was replaced after the model was sharded",
    write_in_forward: "layers.1.weight was modified in place inside the forward of unit layers.1",
    differentiate_twice: "has a graph of its own (create_graph=True)",
    differentiate_on_two_threads: "the backward of unit layers.0 runs on another thread than that of earlier units",
    copy_deeply: "a sharded model cannot be deep-copied",
    pickle_it: "a sharded model cannot be pickled",
    shard_lazy: "2 parameters are not initialised yet (such as 0.weight)",
    use_fused_sgd: "SGD with fused=True cannot update sharded parameters",
}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.__name__)
def test_what_cannot_work_is_refused_in_words(run_ranks: RunRanks, case: Callable[[], str]) -> None:
    first, second = run_ranks(2, case)
    assert first == second
    assert REFUSALS[case] in first


def train_complex_and_sparse() -> tuple[Tensor, Tensor]:
    """A complex weight and a sparse embedding gradient, against one process."""
    results = []
    for sharded in (True, False):
        with fixed_seed(0):
            phase = nn.Linear(4, 4, dtype=torch.complex64)
            model: nn.Module = nn.ModuleDict({"table": nn.Embedding(9, 4, sparse=True), "phase": phase})
        model.forward = lambda ids, m=model: m["phase"](m["table"](ids).cfloat()).abs()
        ids = torch.arange(6)
        if sharded:
            wrapped = fully_shard_model(model)
            wrapped(ids.chunk(dist.get_world_size())[dist.get_rank()]).mean().backward()
            grads = wrapped.full_gradients()
        else:
            model(ids).mean().backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
        table, phase = grads["table.weight"], grads["phase.weight"]
        assert table is not None
        assert phase is not None
        results.append((table.to_dense() if table.is_sparse else table, phase))
    (found_table, found_phase), (table, phase) = results
    return (found_table - table).abs().max(), (found_phase - phase).abs().max()


def test_complex_weights_and_sparse_gradients_are_right(run_ranks: RunRanks) -> None:
    for table_error, phase_error in run_ranks(2, train_complex_and_sparse):
        assert table_error < 1e-6
        assert phase_error < 1e-6


def train_after_inference_mode(strategy: int, is_built_there: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and buffers after two steps of a model wrapped in inference mode, and those of one process."""

    def build(seed: int) -> nn.Module:
        with fixed_seed(seed):
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model(torch.arange(3.0 * WIDTH).view(3, WIDTH).sin()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    reference = build(0)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    with torch.inference_mode(is_built_there):
        plain = build(dist.get_rank())
    with torch.inference_mode(), pytest.warns(UserWarning, match="differed between ranks"):
        model, optimizer = _wrap(plain, (nn.Linear,), strategy)
    optimizer.param_groups[0]["momentum"] = 0.0
    train(model, optimizer)
    found = {**model.full_parameters(), **dict(plain.named_buffers())}
    return found, {**dict(reference.named_parameters()), **dict(reference.named_buffers())}


@pytest.mark.parametrize("is_built_there", [False, True])
@pytest.mark.parametrize("strategy", [0, 3])
def test_a_model_wrapped_in_inference_mode_trains_outside(
    run_ranks: RunRanks, strategy: int, is_built_there: bool
) -> None:
    for found, wanted in run_ranks(2, train_after_inference_mode, strategy, is_built_there):
        assert_equal_tensors(found, wanted, rtol=1e-5, atol=1e-6)
