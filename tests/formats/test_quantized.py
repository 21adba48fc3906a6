"""Frozen quantised bases under adapters: the bits of one process under every door, bytes, checkpoints, bad input."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import fsdp2, fully_shard, fully_shard_model
from megatron_fsdp.checkpoint.hf import save_hf
from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.arrangements import hybrid
from tests.support.case import (
    InPlace,
    OptimizerFn,
    Recording,
    Run,
    Scenario,
    Setting,
    Tolerance,
    check_jobs,
    full_of,
    sgd,
)
from tests.support.doors import in_place, one_by_one
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.tensor_extension import Coded
from tests.support.zoo import ModelCase, make_vector_batch, vector_loss

WIDTH = 66  # of rows that no number of ranks divides in whole blocks


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test whose body runs on ranks, which cannot skip it themselves."""
    lacks = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacks), reason=f"needs {', '.join(lacks)}")


class Rows(Coded):
    """A tensor class of ours: int8 codes and a scale for each row."""

    @staticmethod
    def __new__(cls: type["Rows"], codes: torch.Tensor, scale: torch.Tensor | None = None) -> "Rows":
        if scale is None:
            scale = codes.abs().amax(dim=1, keepdim=True) / 127
            codes = (codes / scale).round().to(torch.int8)
        return Coded.__new__(cls, codes, scale)


def bitsandbytes(linear: nn.Linear, kind: str) -> nn.Module:
    nn_of = pytest.importorskip("bitsandbytes").nn
    shape, bias = (linear.in_features, linear.out_features), linear.bias is not None
    if kind == "int8":
        made = nn_of.Linear8bitLt(*shape, bias, has_fp16_weights=False)
    else:
        made = nn_of.Linear4bit(
            *shape, bias, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=kind == "nested",
            quant_storage=torch.bfloat16 if kind == "stored as floats" else torch.uint8,
        )  # fmt: skip
        made.support_avx512bf16_for_cpu = False  # one process would pack weights for evaluations, and round scales
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def torchao(linear: nn.Linear, kind: str) -> nn.Module:
    quantization = pytest.importorskip("torchao").quantization
    if kind == "nf4":
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        linear.weight = nn.Parameter(nf4.to_nf4(linear.weight.detach(), WIDTH, 2), requires_grad=False)
        return linear
    config = {"int8": quantization.Int8WeightOnlyConfig, "float8": quantization.Float8WeightOnlyConfig}[kind]()
    quantization.quantize_(linear, config)
    return linear


def quantise(linear: nn.Linear, kind: str) -> nn.Module:
    library, _, rest = kind.partition(" ")
    if library == "ours":
        linear.weight = nn.Parameter(Rows(linear.weight.detach()), requires_grad=False)
        made: nn.Module = linear
    else:
        made = (bitsandbytes if library == "bitsandbytes" else torchao)(linear, rest)
    return made.requires_grad_(False)


class OtherRows(Rows):
    """Of the same bytes."""


class Adapted(nn.Module):
    """A quantised layer with a low-rank adapter beside it, called twice and recomputed in backward."""

    def __init__(self, kind: str, bias: bool) -> None:
        super().__init__()
        self.base: Any = quantise(nn.Linear(WIDTH, WIDTH, bias=bias), kind)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)

    def once(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(self.once, self.once(x), use_reentrant=False)
        return again


def build(kind: str = "ours", ties: bool = False) -> Any:
    with fixed_seed(0):
        model: Any = nn.Sequential(
            Adapted(kind, bias=True), Adapted(kind, bias=False), quantise(nn.Linear(WIDTH, 5), "ours")
        )
    if ties:
        model[1].base.weight = model[0].base.weight
    return model


def train_and_evaluate(run: Run) -> None:
    """Notes what adapters have; the rest stays as it is."""
    adapters = {name: param for name, param in run.parameters().items() if param.requires_grad}
    for step in range(3):
        run.backward(step)
        run.note_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad()
    with torch.no_grad():
        run.loss(3)
    run.note("adapters", {name: full_of(param) for name, param in adapters.items()})


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def every_parameter(model: nn.Module) -> torch.optim.Optimizer:
    """With what no step changes, as most users build it."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def scenario(build: Callable[[], nn.Module], optimizer: OptimizerFn = every_parameter) -> Scenario:
    make_batch = partial(make_vector_batch, features=(WIDTH, 5))
    return Scenario(train_and_evaluate, ModelCase(build, make_batch, vector_loss, (Adapted,)), optimizer)


def wrapped(model: nn.Module, **options: Any) -> Any:
    return fully_shard(model, every_parameter(model), fsdp_unit_modules=[Adapted], **options)[0]


DOORS: dict[str, Any] = {
    **{f"strategy {number}": Setting(number) for number in range(4)},
    "hybrid": Setting(3, arrangement=hybrid(2, 2)),
    "fine-grained": Setting(3, options=(("enable_fine_grained_param_gather", True),)),
    "fsdp2": InPlace(partial(one_by_one, fsdp2.fully_shard)),
    "experimental": InPlace(in_place),
}


def check(run_ranks: RunRanks, ranks: int, kind: str, door: str, ties: bool = False) -> None:
    optimizer = sgd if isinstance(DOORS[door], InPlace) else every_parameter
    jobs = [(scenario(partial(build, kind, ties), optimizer), DOORS[door])]
    check_jobs(run_ranks, ranks, jobs, Tolerance(rtol=2e-5, atol=2e-6))


@pytest.mark.parametrize(
    ("ranks", "door"), [*((2, door) for door in DOORS if door != "hybrid"), (3, "strategy 3"), (4, "hybrid")]
)
def test_a_class_of_codes_and_scales_trains_as_in_one_process(run_ranks: RunRanks, ranks: int, door: str) -> None:
    check(run_ranks, ranks, "ours", door)


@pytest.mark.parametrize("door", ["strategy 3", "fsdp2"])
def test_a_tied_weight_stays_one(run_ranks: RunRanks, door: str) -> None:
    check(run_ranks, 2, "ours", door, ties=True)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("door", ["strategy 3", "fsdp2", "experimental"])
@pytest.mark.parametrize("kind", ["nf4", "nested", "stored as floats", "int8"])
def test_weights_of_bitsandbytes_train_as_in_one_process(run_ranks: RunRanks, kind: str, door: str) -> None:
    pytest.importorskip("bitsandbytes")
    check(run_ranks, 3, f"bitsandbytes {kind}", door)


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("door", ["strategy 3", "fsdp2"])
@pytest.mark.parametrize("kind", ["int8", "float8", "nf4"])
def test_weights_of_torchao_train_as_in_one_process(run_ranks: RunRanks, kind: str, door: str) -> None:
    pytest.importorskip("torchao")
    check(run_ranks, 3, f"torchao {kind}", door)


@on_ranks(2)
def test_weights_are_kept_and_sent_as_the_bytes_that_they_have(tmp_path: Path) -> None:
    model = wrapped(build())
    codes, scales = WIDTH * WIDTH, 4 * WIDTH
    (group,) = (group for group in model.parameter_groups() if group.names[0].startswith("0.base.parametrizations"))
    assert (group.plan.precision.compute, group.plan.layout.payload_numel) == (torch.uint8, codes + scales)
    assert group.plan.held_bytes == group.plan.sent_bytes // 2 < (codes + scales) // 2 + 16
    assert "frozen quantised weights (3 Rows) are kept and gathered as their bytes" in str(model.describe())
    assert "the model has quantised weights (0.base.parametrizations.weight.original0)" in refusal(
        save_hf, model, tmp_path
    )
    if dist.get_rank() == 0:  # alone: no collective may begin
        for name, layer in (("0.base", model.module[0].base), ("2", model.module[2])):
            words = f"^{name}.weight is a quantised weight of a sharded model, which can be read inside of a forward"
            with pytest.raises(ConfigurationError, match=words):
                _ = layer.weight
            with pytest.raises(ConfigurationError, match=words):
                layer.weight = nn.Parameter(torch.zeros(1))


@on_ranks(2)
def test_ranks_with_weights_of_other_classes_are_told_so() -> None:
    model = build()
    if dist.get_rank() == 1:
        model[0].base.weight = nn.Parameter(OtherRows(model[0].base.weight.detach()), requires_grad=False)
    assert "the format of 0.base.weight is Rows: int8[66, 66], float32[66, 1], None on rank 0, OtherRows" in refusal(
        fully_shard_model, model
    )


@needs("bitsandbytes")
@on_ranks(2)
def test_a_weight_may_be_given_to_itself_in_a_forward() -> None:
    model = build("bitsandbytes nf4")

    def give(module: nn.Module, _args: Any) -> None:  # as peft's DoRA does on CPUs
        module.weight = module.weight.to("cpu")

    wanted = model(torch.ones(2, WIDTH))
    model[0].base.register_forward_pre_hook(give)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Adapted])
    torch.testing.assert_close(sharded(torch.ones(2, WIDTH)), wanted)


def trained_on(run: Run) -> list[Any]:
    """What further steps note."""
    run.recording = Recording()
    train_and_evaluate(run)
    return [values for _, values in run.recording.notes]


def save(kind: str, folder: Path) -> list[Any]:
    run = Run(scenario(partial(build, kind)), Setting(3))
    train_and_evaluate(run)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=folder)
    return trained_on(run)


def build_others(kind: str) -> nn.Module:
    """Nothing that a model is built with may be left."""
    model = build(kind)
    with torch.no_grad():
        for layer in model[:2]:
            layer.base = quantise(nn.Linear(WIDTH, WIDTH, bias=layer.base.bias is not None), kind)
            layer.up.weight.zero_()
    return model  # type: ignore[no-any-return]


def load(kind: str, folder: Path) -> list[Any]:
    run = Run(scenario(partial(build_others, kind)), Setting(3))
    state = run.model.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder)
    run.model.load_state_dict(state)
    return trained_on(run)


@pytest.mark.parametrize("kind", ["ours", "bitsandbytes nested", "bitsandbytes int8"])
def test_checkpoints_hold_the_bytes_and_load_on_other_ranks(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    if kind != "ours":
        pytest.importorskip("bitsandbytes")
    wanted = run_ranks(2, save, kind, tmp_path)[0]
    for ranks in (1, 3):
        torch.testing.assert_close(run_ranks(ranks, load, kind, tmp_path)[0], wanted, rtol=2e-5, atol=2e-6)


@needs("bitsandbytes")
@on_ranks(2)
def test_weights_of_bitsandbytes_that_cannot_be_gathered_are_refused_by_name() -> None:
    bnb = pytest.importorskip("bitsandbytes").nn
    for made, words in (
        (bnb.Linear4bit(64, 64), "0.weight is a Params4bit, a quantised weight of bitsandbytes that is not quantised"),
        (bnb.Linear8bitLt(64, 64), "0.weight is a Int8Params, a quantised weight, and is trained; freeze it"),
    ):
        assert words in refusal(fully_shard_model, nn.Sequential(made, nn.Linear(64, 2)))


@needs("bitsandbytes")
@on_ranks(4)
def test_weights_of_bitsandbytes_on_tensor_parallel_ranks_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = nn.Sequential(bitsandbytes(nn.Linear(64, 64), "nf4"), nn.Linear(64, 2))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    text = refusal(fully_shard_model, model, mesh, dp_shard_dim="dp_shard", tp_dim="tp")
    assert text.startswith("0.weight is a DTensor, a quantised weight on tensor-parallel ranks")


@on_ranks(2)
def test_a_model_without_adapters_computes_as_before() -> None:
    wanted = build()(torch.ones(2, WIDTH))
    frozen = build().requires_grad_(False)
    for made in (
        fully_shard_model(frozen, fsdp_unit_modules=[Adapted]),
        fsdp2.fully_shard(build().requires_grad_(False)),
    ):
        torch.testing.assert_close(made(torch.ones(2, WIDTH)), wanted)


@needs("torchao", "bitsandbytes")
@pytest.mark.parametrize("library", ["torchao.optim", "bitsandbytes.optim"])
@on_ranks(2)
def test_optimizers_with_kernels_of_their_own_are_refused(library: str) -> None:
    kind = pytest.importorskip(library).AdamW8bit
    words = f"AdamW8bit of {library.partition('.')[0]} steps plain tensors with kernels of its own"
    model = build()
    assert words in refusal(fully_shard, model, kind(adapters(model), lr=0.1))
    one_by_one(fsdp2.fully_shard, *model[:2], model)
    model(torch.ones(1, WIDTH)).sum().backward()
    assert words in refusal(kind(adapters(model), lr=0.1).step)  # which nothing has connected
