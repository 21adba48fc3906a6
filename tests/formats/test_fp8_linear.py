"""Linears that multiply gathered float8 weights: exact arithmetic, the bits of one process, bytes, bad input."""

import math
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.formats import fp8_linear
from megatron_fsdp.formats.fp8_linear import Fp8Weight, encoded_parameters, scaled_product, to_float8
from tests.conftest import RunRanks
from tests.support.arrangements import FLAT, Values, hybrid
from tests.support.case import Run, Scenario, Setting, Tolerance, assert_bits, assert_notes, run_sharded
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.rounded_weights import train_rounded
from tests.support.zoo import MODEL_CASES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
CASE = MODEL_CASES["transformer"]


# ---- the product -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_an_emulated_product_is_the_exact_sum_times_both_scales_rounded(kind: torch.dtype, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    left, left_scale = to_float8(torch.randn(3, 40, generator=draw), kind)
    right, right_scale = to_float8(torch.randn(5, 40, generator=draw), E4M3)
    exact = [
        float(
            sum(Fraction(a) * Fraction(b) for a, b in zip(row, column, strict=True))
            * Fraction(left_scale.item())
            * Fraction(right_scale.item())
        )
        for row in left.double().tolist()
        for column in right.double().tolist()
    ]
    found = scaled_product(left, left_scale, right, right_scale, dtype)
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float64).to(dtype).view(3, 5))


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_values_are_scaled_by_the_largest_and_rounded_to_the_nearest(kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(kind).double()
    magnitudes = codes[codes.isfinite()].unique()
    values = torch.randn(300, generator=torch.Generator().manual_seed(0))
    found, scale = to_float8(values, kind)
    assert scale == values.abs().max() / torch.finfo(kind).max
    wanted = (values / scale).double()
    nearest = magnitudes[(wanted[:, None] - magnitudes).abs().argmin(dim=1)]
    assert torch.equal(found.double(), nearest)
    assert torch.equal(to_float8(torch.zeros(4), kind)[0].float(), torch.zeros(4))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_every_element(bad: float) -> None:
    left, scale = to_float8(torch.tensor([[1.0, bad], [2.0, 3.0]]), E4M3)
    assert not scaled_product(left, scale, left, scale, FP32).isfinite().any()


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A model, its ranks (outer ones, inner ones), and options."""

    ranks: tuple[int, ...] = (2,)
    dtype: torch.dtype = BF16
    outer_strategy: int = 0
    recomputes: bool = False
    keeps: bool = False
    compiles: bool = False

    @property
    def num_ranks(self) -> int:
        return math.prod(self.ranks)

    @property
    def scenario(self) -> Scenario:
        return Scenario(two_microbatches, replace(CASE, build=partial(build, self)), sgd)

    @property
    def setting(self) -> Setting:
        arrangement = replace(hybrid(*self.ranks) if len(self.ranks) > 1 else FLAT, whole=plain)
        options = (("keep_fp8_transpose_cache", self.keeps),)
        return Setting(3, POLICY, True, False, True, self.outer_strategy, True, arrangement, options)


POLICY = MixedPrecisionPolicy(FP32, FP32, weight_format="fp8_compute")
BATCHES = ((0, 1), (2, 3), (4, 5))


def two_microbatches(run: Run) -> None:
    for indices in BATCHES:
        run.backward(*indices)
        run.step()


def plain(values: Values) -> Values:
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in values.items()}


def build(job: Job) -> nn.Module:
    model = CASE.build().to(job.dtype)
    if job.recomputes:
        apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, CASE.unit_classes))
    if job.compiles:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
        for module in model.modules():
            if isinstance(module, CASE.unit_classes):
                module.compile(backend="eager")
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Factors are powers of two, so that fused and plain multiply-adds agree, wherever tensors are cut."""
    return torch.optim.SGD(model.parameters(), lr=2**-5, momentum=0.5)


class _Multiply(torch.autograd.Function):
    """What one process does in place of a linear: the definition, written down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, _weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        ctx.save_for_backward(x, codes, scale)
        rows, own = float8(x.flatten(0, -2), E4M3)
        return ((rows @ codes.T) * (own * scale)).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, codes, scale = ctx.saved_tensors
        rows = grads[0].flatten(0, -2)
        own_codes, own = float8(rows, E5M2)
        x_grad = ((own_codes @ codes) * (own * scale)).to(x.dtype).view(x.shape)
        return x_grad, rows.T.mm(x.flatten(0, -2)), None, None


def float8(values: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scale, float64."""
    scale = (values.abs().max().float() / torch.finfo(kind).max).clamp_min(2.0**-126)
    return (values.float() / scale).to(kind).double(), scale.double()


class Multiplied(nn.Linear):
    """A linear of one process; its weight takes the gradient, and its codes are multiplied."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        product = _Multiply.apply(x, self.weight, *self.encoded)
        return product if self.bias is None else product + self.bias


def multiply_codes(model: nn.Module, main: nn.Module) -> None:
    """Give a model what one process computes with: its weights as codes where a linear multiplies them."""
    for param, exact in zip(model.parameters(), main.parameters(), strict=True):
        param.data = exact.detach().to(param.dtype)
    for (_, linear), (_, exact_linear) in zip(model.named_modules(), main.named_modules(), strict=True):
        if isinstance(linear, nn.Linear):
            linear.__class__ = Multiplied
            linear.encoded = float8(exact_linear.weight.detach(), E4M3)


JOBS = [
    Job((1,), keeps=True),
    pytest.param(Job((2,), keeps=True, recomputes=True), marks=pytest.mark.full),
    pytest.param(Job((2,), compiles=True), marks=pytest.mark.full),
    pytest.param(Job((3,), FP32), marks=pytest.mark.full),
    Job((2, 2), outer_strategy=1),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_training_has_the_bits_of_one_process(run_ranks: RunRanks, job: Job) -> None:
    alone = replace(job, recomputes=False, compiles=False).scenario
    expected = train_rounded(alone, job.ranks, BATCHES, multiply_codes, per_token=True)
    assert_bits([found for (found,) in run_ranks(job.num_ranks, run_sharded, [(job.scenario, job.setting)])], expected)


def four_microbatches(run: Run) -> None:
    """In a step, whatever the ranks."""
    for step in range(3):
        for first in range(0, 4, run.num_ranks):
            run.case.loss(run.model, run.whole_batch(step).part(first + dist.get_rank(), 4)).backward()
        run.step()


def test_deterministic_runs_have_the_same_bits_on_any_ranks(run_ranks: RunRanks) -> None:
    setting = replace(Job().setting, options=(("deterministic", "world"),))
    job = (replace(Job().scenario, script=four_microbatches), setting)
    wanted, other = (run_ranks(num_ranks, run_sharded, [job])[0][0] for num_ranks in (1, 2))
    assert_notes([other], wanted, Tolerance())


def noted() -> list[Any]:
    run = Run(Job().scenario, Job().setting)
    two_microbatches(run)
    return [run.recording.losses, *(dict(values) for _, values in run.recording.notes)]


@on_ranks(2)
def test_float8_products_of_the_device_differ_by_rounding_alone() -> None:
    """Where torch multiplies float8 itself, which it does on CPUs, too: slowly, and adding up in float32."""
    emulated, kinds, product = noted(), [], torch._scaled_mm

    def multiply(left: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        kinds.append(left.dtype)
        return product(left, *others, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "_scaled_mm", multiply)
        patched.setattr(fp8_linear, "multiplies_float8", lambda _: True)
        native = noted()
    assert set(kinds) == {E4M3, E5M2}
    torch.testing.assert_close(native, emulated, rtol=2**-5, atol=2**-6)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def pair() -> tuple[nn.Module, torch.Tensor]:
    """Return two linears, of which tensor parallelism cuts rows and columns, and inputs of two ranks (2, 3, 5, 12)."""
    with fixed_seed(0):
        model = nn.Sequential(OrderedDict(up=nn.Linear(12, 8), act=nn.Tanh(), down=nn.Linear(8, 6)))
        return model, torch.randn(2, 3, 5, 12)


def parts_of_pair() -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Compute in one process: each half of a weight is a tensor of its own, and halves are added up.

    Returns outputs and input gradients of both batches, and the sums of the weight gradients.
    """
    model, batches = pair()
    leaves = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    places = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1))
    ups, biases, downs = (leaves[name].chunk(2, dim) for name, dim in places)
    outputs, grads = [], []
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for batch_ in batches:
        x = batch_.clone().requires_grad_()
        halves = []
        for up, bias, down in zip(ups, biases, downs, strict=True):
            middle = (_Multiply.apply(x, up, *float8(up.detach(), E4M3)) + bias).tanh()
            halves.append(_Multiply.apply(middle, down, *float8(down.detach(), E4M3)))
        outputs.append(halves[0] + halves[1] + leaves["down.bias"])
        x_grad, *found = torch.autograd.grad(outputs[-1].square().sum(), [x, *leaves.values()], retain_graph=True)
        grads.append(x_grad)
        for name, grad in zip(total, found, strict=True):
            total[name] += grad
    return outputs, grads, total


def run_parts() -> Any:
    """Compute on this rank: two data-parallel ranks, each of two tensor-parallel ones; returns its batch, too."""
    model, batches = pair()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model, _ = fully_shard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        mixed_precision_policy=MixedPrecisionPolicy(weight_format="fp8_compute"),
        calculate_per_token_loss=True,
        keep_fp8_transpose_cache=True,
    )
    assert all(type(group.full[0]) is Fp8Weight for group in model.parameter_groups() if group.plan.stays_encoded)
    number = mesh.get_local_rank("dp")
    x = batches[number].clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    weights = {name: param.grad.full_tensor() for name, param in model.module.named_parameters()}
    return number, output.detach(), x.grad, weights


def test_parts_of_weights_multiply_as_tensors_of_their_own(run_ranks: RunRanks) -> None:
    outputs, x_grads, weight_grads = parts_of_pair()
    for number, output, x_grad, weights in run_ranks(4, run_parts):
        assert torch.equal(output, outputs[number])
        assert torch.equal(x_grad, x_grads[number])
        assert [name for name in weights if not torch.equal(weights[name], weight_grads[name])] == []


# ---- memory ----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Linears that are called twice in a forward, so that backward wants them transposed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)
        self.between: Any = None  # called between the backwards of the calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.second(self.first(x)).tanh()
        if middle.requires_grad:
            middle.register_hook(lambda _: self.between())
        return self.second(self.first(middle))


def transposed_bytes(keeps: bool) -> list[int]:
    """Return the bytes of codes transposed in each unit's backward, after it all and after a step; then of codes."""
    model = nn.Sequential(*(Twice() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[Twice],
        mixed_precision_policy=MixedPrecisionPolicy(weight_format="fp8_compute"),
        keep_fp8_transpose_cache=keeps,
    )
    weights = [param for group in model.parameter_groups() for param in group.full]
    assert all(type(weight) is Fp8Weight for weight in weights)

    def held() -> int:
        return sum(each.held.transposed.nbytes for each in weights if each.held.transposed is not None)

    found: list[int] = []
    for module in model.module:
        module.between = lambda: found.append(held())
    model(torch.randn(4, 32)).sum().backward()
    found.append(held())
    optimizer.step()
    gathered = sum(group.plan.gathered_bytes for group in model.parameter_groups())
    return [*found, held(), gathered]


@pytest.mark.unmerged
@pytest.mark.parametrize(
    ("ranks", "keeps", "in_units"),
    [(2, True, [2, 4, 4, 4, 4, 0, 8]), (2, False, [0, 0, 0, 0, 0, 0, 8]), (1, True, [2, 4, 6, 8, 8, 0, 0])],
)
def test_transposed_codes_are_kept_while_weights_are_gathered(
    run_ranks: RunRanks, ranks: int, keeps: bool, in_units: list[int]
) -> None:
    """Two units are gathered at a time where two ranks shard; what one rank holds is whole all the time."""
    assert run_ranks(ranks, transposed_bytes, keeps) == [[each * 32 * 48 for each in in_units]] * ranks


@on_ranks(2)
def test_codes_are_sharded_gathered_and_described() -> None:
    run = Run(Job().scenario, Job().setting)
    model = run.sharded
    assert model is not None
    before = model.traffic()
    run.loss(0)
    sent = model.traffic().since(before).gather_bytes
    groups = [group for group in model.parameter_groups() if group.plan.stays_encoded]
    linears = [each for each in build(Job()).modules() if isinstance(each, nn.Linear)]
    assert sum(group.plan.layout.payload_numel for group in groups) == sum(each.weight.numel() for each in linears)
    for group in groups:
        assert group.plan.gathered_bytes == group.plan.layout.numel == 2 * group.weights.compute.local.nbytes
        assert not any(weight.held.codes.data_ptr() % 16 for weight in group.full)  # else GPUs cannot multiply them
    assert sent == sum(group.plan.sent_bytes // 2 for group in model.parameter_groups() if group.plan.needs_all_gather)
    told = str(model.describe())
    assert "gather fp8_compute" in told
    assert "note: fp8_compute: 19 weights (first: head.weight) are multiplied in float64" in told


# ---- checkpoints, other uses, bad input ------------------------------------------------------------------------------


@on_ranks(1)
def test_whatever_is_no_linear_computes_with_decoded_weights() -> None:
    model = nn.Linear(16, 32)
    codes, scale = to_float8(model.weight.detach(), E4M3)
    decoded = codes.float() * scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model, _ = fully_shard(model, optimizer, mixed_precision_policy=MixedPrecisionPolicy(weight_format="fp8_compute"))
    x = torch.randn(2, 4, 16)
    exact = model(x)
    (weight,) = seen
    assert torch.equal(weight.square().sum(), decoded.square().sum())
    assert torch.equal(torch.stack([weight, weight])[1], decoded)
    torch.testing.assert_close(model(x[0, 0]), exact[0, 0], rtol=0.1, atol=0.1)  # an input has a scale of its own
    assert model(x[:, :0]).shape == (2, 0, 32)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x)
    assert rounded.dtype is BF16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.1, atol=0.1)
    with pytest.raises(RuntimeError, match="same dtype"):
        model(x.double())


def model_of_kinds() -> nn.ModuleDict:
    return nn.ModuleDict(
        {"words": nn.Embedding(5, 4), "plain": nn.Linear(4, 4), "own": Multiplied(4, 4), "conv": nn.Conv1d(4, 4, 2)}
        | {"experts": nn.ParameterList([torch.zeros(3, 4, 4)])}
    )


def formats_of(asked: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    policy, strategy = MixedPrecisionPolicy(weight_format=asked), ShardingStrategy.optim_grads_params
    found = encoded_parameters(model_of_kinds(), policy, strategy)
    return {name: (form.name, form.stays_encoded) for name, form in found.items()}


def test_patterns_choose_what_computes_and_what_is_decoded() -> None:
    assert formats_of({"conv.*": "nvfp4", "*": "fp8_compute"}) == {
        "plain.weight": ("fp8_compute", True),
        "own.weight": ("fp8", False),
        "conv.weight": ("nvfp4", False),
        "experts.0": ("fp8", False),
    }
    kept = formats_of({"words.*": None, "own.*": "nvfp4", "conv.*": None, "*": "fp8"})
    decoded = {"plain.weight": ("fp8", False), "own.weight": ("nvfp4", False), "experts.0": ("fp8", False)}
    assert kept == decoded


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"own.*": "fp8_compute"}, "has 'own.*', of whose parameters (own.weight, own.bias) none is the weight"),
        ({"experts.*": "fp8_compute"}, "nor a stack of experts); give 'fp8' there, to gather the same"),
        ({"words.*": "fp8", "*": "fp8"}, "has 'words.*', which concerns no parameter: words.weight are embeddings"),
        ({"*": "fp8", "own.*": None}, "has 'own.*', which has no effect, since an earlier pattern matches"),
        ({"*": "fp8", "owm.*": None}, "has 'owm.*', which matches none of the 8 parameters"),
        ({"own.*": None, "w*": "fp8"}, "has 'w*', which concerns no parameter: words.weight are embeddings"),
    ],
)
def test_a_pattern_that_takes_no_effect_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        formats_of(asked)
