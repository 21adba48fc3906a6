"""Models that reach their parameters in unusual ways train as on one process, or are refused by name."""

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrize

from megatron_fsdp import MegatronFSDP, experimental, fsdp2, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from tests.conftest import RunRanks
from tests.support.api_net import gradients, own_part
from tests.support.arrangements import hybrid
from tests.support.case import Run, Scenario, Setting, check_strategies, shard
from tests.support.case import momentum as sgd
from tests.support.on_ranks import assert_equal_tensors, first_rank_warns, fixed_seed, on_ranks, refusal
from tests.support.zoo import FEATURES, Batch, Between, ModelCase, Ordered, Recurrent, make_batch, vector_loss

WIDTH = FEATURES
Linears = partial(Ordered, unit=partial(nn.Linear, WIDTH, WIDTH))


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


class Threaded(Ordered):
    def middle(self, x: Tensor) -> Tensor:
        first, second, *_ = self.layers
        return second(BackwardOnAThread.apply(first, x))  # type: ignore[no-untyped-call]


class ReturnsWeight(nn.Linear):
    """Hands out a view of its own weight, which is used when other units have been gathered into the same slot."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return torch.tanh(super().forward(x)), self.weight.t()


class UsesReturned(Ordered):
    def middle(self, x: Tensor) -> Tensor:
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
        self.layers = Linears()

    def forward(self, x: Tensor) -> Tensor:
        first, second = (prompt() for prompt in self.prompts)
        return self.layers(x) @ first + x @ second


class Masked(Ordered):
    """Half of the gradient of one weight is masked by a hook that was registered before sharding."""

    def __init__(self) -> None:
        super().__init__(unit=partial(nn.Linear, WIDTH, WIDTH))
        self.layers[1].weight.register_hook(_mask)


def _mask(grad: Tensor) -> Tensor:
    return grad * (torch.arange(grad.numel()) % 2).view_as(grad)


class Strided(Ordered):
    """Parameters that do not lie contiguous in memory: every other column, every other element, real parts."""

    def __init__(self) -> None:
        super().__init__(unit=partial(nn.Linear, WIDTH, WIDTH))
        self.layers[0].weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.layers[0].bias = nn.Parameter(torch.randn(2 * WIDTH)[::2])
        self.layers[1].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).real)


class CastsForGood(nn.Module):
    """Casts a layer inside of its forward, as the router of SwitchTransformers does; the first time counts for all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, size * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float64)
        return self.router(x.to(torch.float64)).to(x.dtype).unflatten(-1, (-1, WIDTH)).mean(-2)


def casts_of_sizes() -> nn.Module:
    """Units that take turns in memory of two sizes."""
    return nn.Sequential(*map(CastsForGood, (1, 4, 1, 8, 1)))


def globally_penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """By reductions over the ranks: every rank adds the whole penalty, as one process does."""
    return vector_loss(model, batch) + 0.1 * sum((param**2).sum() for param in model.parameters())


def loss_times_numbers(model: nn.Module, batch: Batch) -> Tensor:
    """Numbers made of parameters, and a whole one, meet data outside of the forward, so gradients differ by rank."""
    first, second, third, fourth = (layer.weight for layer in _layers(model))
    whole = fourth.full_tensor() if isinstance(fourth, DTensor) else fourth
    scaled = model(batch.inputs) @ whole / torch.linalg.vector_norm(third, keepdim=True).reshape(())
    error = F.mse_loss(scaled, batch.targets)
    norms = torch.stack([param.norm() for param in model.parameters()])
    return error * (first**2).sum() / norms.norm() + error * second.max() * 0.1 * (second**2).sum()


def _layers(model: nn.Module) -> nn.ModuleList:
    return (model.module if isinstance(model, MegatronFSDP) else model).layers  # type: ignore[return-value]


class ReadsEnds(Ordered):
    """Multiplies by weights of modules beside the blocks without calling these, in forward and in a method of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.middle(self.first(x)) @ self.first.weight)

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.last.weight, self.last.bias)


def linear_case(build: Callable[[], nn.Module], loss: Callable[[nn.Module, Batch], Tensor] = vector_loss) -> ModelCase:
    return ModelCase(build, make_batch, loss, (nn.Linear,))


CASES = {
    "recurrent": ModelCase(Recurrent, make_batch, vector_loss, (nn.LSTM,)),
    "global penalty": linear_case(Linears, globally_penalised_loss),
    "numbers times data": linear_case(Linears, loss_times_numbers),
    "returned view": ModelCase(
        partial(UsesReturned, unit=partial(ReturnsWeight, WIDTH, WIDTH)), make_batch, vector_loss, (ReturnsWeight,)
    ),
    "returned parameter": ModelCase(Prompted, make_batch, vector_loss, (Prompt, nn.Linear)),
    "gradient hook": linear_case(Masked),
    "strided": linear_case(Strided),
    "cast for good": ModelCase(casts_of_sizes, make_batch, vector_loss, (CastsForGood,)),
    "ends that are read, of units that nobody named": ModelCase(ReadsEnds, make_batch, vector_loss, None),  # type: ignore[arg-type]
}


def two_microbatches(run: Run) -> None:
    for step in range(3):
        run.backward(10 * step, 10 * step + 1)
        run.step()
    # One process has parameters in what a forward cast them to; sharded ones keep their dtype.
    for _, values in run.recording.notes:
        values.update({name: None if value is None else value.float() for name, value in values.items()})


# On 3 ranks shards are cut inside rows.
RUNS = [(name, *setting) for name in CASES for setting in [(2, Setting(0)), (2, Setting(1)), (3, Setting(3))]]
RUNS.append(("numbers times data", 4, Setting(3, arrangement=hybrid(2, 2))))


@pytest.mark.full(
    cover=1, short=["global penalty-2-setting3", "ends that are read, of units that nobody named-3-setting26"]
)
@pytest.mark.parametrize(("name", "num_ranks", "setting"), RUNS)
def test_trains_as_one_process(run_ranks: RunRanks, name: str, num_ranks: int, setting: Setting) -> None:
    check_strategies(run_ranks, num_ranks, Scenario(two_microbatches, CASES[name], sgd), [setting])


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_what_summed_gradients_mean_for_a_number_is_not_guessed(strategy: int) -> None:
    with fixed_seed(0):
        reference = Linears()
    model, _ = shard(CASES["global penalty"], sgd, zero_dp_strategy=strategy, calculate_per_token_loss=True)
    batch = make_batch(12, torch.Generator().manual_seed(0))
    own = batch.part(dist.get_rank(), 2)
    globally_penalised_loss(reference, batch).backward()
    mine = vector_loss(model, own) / 2
    (mine + 0.1 * sum((param**2).sum() for param in model.parameters())).backward()
    assert_equal_tensors(gradients(model), gradients(reference), atol=1e-6)
    with pytest.raises(ShardOperationError, match="ranks have different gradients for a number or a whole tensor"):
        (vector_loss(model, own) * model.module.layers[0].weight.norm()).backward()


@pytest.mark.unmerged
@on_ranks(2)
def test_ranks_that_call_different_units_are_found() -> None:
    model = wrapped(1)
    model.module.order = (0, 1 + dist.get_rank())
    message = refusal(lambda: model(X).sum().backward())
    assert message.startswith("ranks gathered or reduced different units")


X = torch.ones(2, WIDTH)


def wrapped(strategy: int = 3, build: Callable[[], nn.Module] = Linears) -> Any:
    return shard(linear_case(build), sgd, zero_dp_strategy=strategy)[0]


def call_with_other_weights(model: MegatronFSDP) -> None:
    torch.func.functional_call(model, {k: p.detach() for k, p in model.named_parameters()}, (X,))


def replace_data(model: MegatronFSDP) -> None:
    param = model.module.layers[2].weight
    model(X)
    param._local_tensor = torch.zeros_like(param._local_tensor)
    model(X)


def parametrize_one(model: MegatronFSDP) -> None:
    parametrize.register_parametrization(model.module.layers[0], "weight", nn.Identity())
    model(X)


def write_in_forward(model: MegatronFSDP) -> None:
    def clamp(layer: nn.Module, _args: object) -> None:
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)

    model.module.layers[1].register_forward_pre_hook(clamp)
    model(X)


# What is done with a model, what is said, and how the model is wrapped.
REFUSALS: dict[str, tuple[Any, ...]] = {
    "other weights": (
        call_with_other_weights,
        "weight of a Linear in unit first is not the sharded parameter any more",
    ),
    "data replaced": (replace_data, "the data of layers.2.weight was replaced after the model was sharded"),
    "parametrized": (
        parametrize_one,
        "is not the sharded parameter any more (functional_call, or assigned, pruned or parametrized after sharding)",
    ),
    "swapped": (
        lambda model: torch.utils.swap_tensors(*(model.module.layers[place].weight for place in (0, 1))),
        "a sharded parameter of shape (6, 6) would be swapped for other memory",
    ),
    "write in forward": (write_in_forward, "the forward of layers.1 modified its weights in place"),
    "second derivative": (
        lambda model: model(X).sum().backward(create_graph=True),
        "has a graph of its own (create_graph=True)",
        0,
    ),
    "two threads": (
        lambda model: model(X.clone().requires_grad_()).sum().backward(),
        "the backward of unit layers.0 runs on another thread than that of earlier units",
        3,
        partial(Threaded, unit=partial(nn.Linear, WIDTH, WIDTH)),
    ),
    "deep copy": (copy.deepcopy, "a sharded model cannot be deep-copied"),
    "pickle": (lambda model: torch.save(model, io.BytesIO()), "a sharded model cannot be pickled"),
    "lazy": (
        lambda _: fully_shard_model(nn.Sequential(nn.LazyLinear(3))),
        "2 parameters are not initialised yet (such as 0.weight)",
    ),
    "a newline in a name": (
        lambda _: fully_shard_model(nn.ModuleDict({"a\nb": nn.Linear(2, 2)})),
        r"'a\nb.weight' holds control characters, which no key of a checkpoint may; rename it",
    ),
    "a newline in a name, as in PyTorch": (
        lambda _: fsdp2.fully_shard(nn.Sequential(nn.ModuleDict({"a\nb": nn.Linear(2, 2)}))),
        r"'0.a\nb.weight' holds control characters, which no key of a checkpoint may; rename it",
    ),
    "a newline in a name, in place": (
        lambda _: in_place(nn.Sequential(nn.ModuleDict({"a\nb": nn.Linear(2, 2)}))),
        r"'0.a\nb.weight' holds control characters, which no key of a checkpoint may; rename it",
    ),
    "Join": (
        lambda model: Join([model]).__enter__(),
        "leave Join out, and have ranks with fewer batches call model.join().backward() in each step",
    ),
    "fused SGD": (
        lambda model: fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True)),
        "SGD with fused=True cannot update sharded parameters",
    ),
}


def in_place(module: nn.Module) -> None:
    mesh, cut = init_device_mesh("cpu", (2,)), [Shard(0)]
    with experimental.fully_shard_context("cpu"):
        experimental.fully_shard(module, mesh, experimental.Placements([0], cut, cut, cut))


@pytest.mark.unmerged
@on_ranks(2)
def test_what_cannot_work_is_refused_in_words() -> None:
    for use, words, *how in REFUSALS.values():
        model = wrapped(*how)
        assert words in refusal(use, model)


@on_ranks(2)
def test_complex_weights_and_sparse_gradients_are_right() -> None:
    with fixed_seed(0):
        phase = nn.Linear(4, 4, dtype=torch.complex64)
        reference = nn.ModuleDict({"table": nn.Embedding(9, 4, sparse=True), "phase": phase})

    def forward(model: nn.Module, ids: Tensor) -> Tensor:
        return model["phase"](model["table"](ids).cfloat()).abs()

    module, ids = copy.deepcopy(reference), torch.arange(6)
    module.forward = lambda ids: forward(module, ids)
    model = fully_shard_model(module)
    model(own_part(ids)).mean().backward()
    forward(reference, ids).mean().backward()
    found, wanted = gradients(model), gradients(reference)
    table = found["table.weight"]
    assert torch.allclose(table.to_dense() if table.is_sparse else table, wanted["table.weight"].to_dense(), atol=1e-6)
    assert torch.allclose(found["phase.weight"], wanted["phase.weight"], atol=1e-6)


@pytest.mark.parametrize(("strategy", "is_built_there"), [(0, False), (3, True)])
@on_ranks(2)
def test_a_model_wrapped_in_inference_mode_trains_outside(strategy: int, is_built_there: bool) -> None:
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
    with torch.inference_mode(), first_rank_warns("differed between ranks"):
        model, optimizer = shard(plain, sgd, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
    optimizer.param_groups[0]["momentum"] = 0.0
    train(model, optimizer)
    found = {**model.full_parameters(), **dict(plain.named_buffers())}
    wanted = {**dict(reference.named_parameters()), **dict(reference.named_buffers())}
    assert_equal_tensors(found, wanted, rtol=1e-5, atol=1e-6)


# ---- weights of modules that were not called yet -------------------------------------------------------------------


class ReadsAhead(Between):
    """Reads dtype and value of weights of other units before and after their modules are called."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(next(self.parameters()).dtype)).float().type_as(self.last.weight)
        penalty = self.last.weight.square().sum() + self.first.bias.sum()
        return self.last(x).sum() + penalty.to(self.first.weight.dtype)


@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_weights_of_other_units_have_the_compute_dtype_inside_a_forward(strategy: int) -> None:
    with fixed_seed(0):
        alone = ReadsAhead().bfloat16()
    model = fully_shard_model(copy.deepcopy(alone), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
    found, expected = model(X), alone(X)
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    wanted = {name: grad.float() for name, grad in gradients(alone).items()}
    assert wanted.keys() == dict(alone.named_parameters()).keys()
    assert_equal_tensors(gradients(model), wanted, rtol=0.02, atol=0.02)
    with pytest.raises(ConfigurationError, match="is not the sharded parameter any more"):
        torch.func.functional_call(model.module, {"last.weight": torch.zeros(WIDTH, WIDTH)}, X)
