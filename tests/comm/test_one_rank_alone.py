"""What is wrong on one rank only is the same sentence on all, at once: every public call that ends in a collective.

Each entry of the table is such a call, wrong on rank 1. A process group with a limit shows who waits.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import (
    AdamW8bit,
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    experimental,
    fsdp2,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    meet_ranks,
)
from megatron_fsdp import automodel as am
from megatron_fsdp import uneven_dtensor as uneven
from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.hf import load_adapter, load_hf, save_adapter, save_hf
from megatron_fsdp.comm.groups import set_timeout
from megatron_fsdp.config.engine_options import MESSAGE_VARIABLE
from megatron_fsdp.ddp import DistributedDataParallel, DistributedOptimizer
from megatron_fsdp.doctor import check_parity
from megatron_fsdp.state import statistics
from megatron_fsdp.trace import trace
from megatron_fsdp.weights import WeightSource, send
from tests.conftest import RunRanks
from tests.support.on_ranks import of_ranks, on_ranks
from tests.support.worker_pool import WorkerError

LIMIT = timedelta(seconds=10)
Call = Callable[[bool], Any]
"""A call, wrong where it gets True."""


# ---- what is called upon ---------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def both(**given: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    module = net()
    given.setdefault("fsdp_unit_modules", [nn.Linear])
    return fully_shard(module, torch.optim.AdamW(module.parameters()), **given)


def model(**given: Any) -> MegatronFSDP:
    given.setdefault("fsdp_unit_modules", [nn.Linear])
    return fully_shard_model(net(), **given)


def trained(**given: Any) -> MegatronFSDP:
    made = model(**given)
    step(made)
    return made


def step(made: nn.Module) -> None:
    made(torch.ones(2, 8)).sum().backward()


def ddp(**given: Any) -> MegatronFSDP:
    return DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), net(), **given)


def of_index(*given: Any, **more: Any) -> MegatronFSDP:
    index = FSDPDistributedIndex(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("d",)), "d")
    module, *others = given or (net(),)
    return MegatronFSDP(module, *(others or [index]), **more)


def folder() -> str:
    """A new folder of all ranks."""
    made = [tempfile.mkdtemp()]
    dist.broadcast_object_list(made)
    return made[0]


def missing() -> str:
    return str(Path(tempfile.gettempdir()) / "no" / "such" / "folder")


def cut() -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)


def given(argument: str, wrong: Any, right: Any = None, make: Callable[..., Any] = model) -> Call:
    """A call of one argument that has a wrong value."""
    return lambda bad: make(**{argument: wrong if bad else right})


def with_variable(name: str, value: str) -> Call:
    def call(bad: bool) -> None:
        with mock.patch.dict(os.environ, {name: value} if bad else {}):
            model()

    return call


def without_memory(
    act: Callable[[Any], Any],
    number: int = 0,
    place: tuple[Any, str] = (torch, "empty"),
    make: Callable[[], Any] | None = None,
) -> Call:
    """A call on a trained model in which a function, such as an allocation, fails."""

    def call(bad: bool) -> None:
        real, left, made = getattr(*place), [number], (make or trained)()

        def fails(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if bad and left[0] < 0:
                raise torch.OutOfMemoryError("planted")
            return real(*args, **kwargs)

        with mock.patch.object(*place, fails):
            act(made)

    return call


def changed(change: Callable[[Any], object]) -> Call:
    """A model that is another one."""

    def call(bad: bool) -> None:
        module = net()
        if bad:
            change(module)
        fully_shard_model(module, fsdp_unit_modules=[nn.Linear])

    return call


def of_model(act: Callable[[Any], Any]) -> Call:
    """A call that gets something else than a model."""

    def call(bad: bool) -> None:
        made = model()
        act(3 if bad else made)

    return call


class Extra:
    """What is saved along, and raises."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, _: Any) -> None:
        self.state_dict()


class MuteError(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class LoudError(BaseException):
    """What a handler of a signal may raise."""

    def __init__(self, *, cannot_be_unpickled: bool) -> None:
        super().__init__("loud" if cannot_be_unpickled else "")


def saves(**wrong: Any) -> Call:
    """A checkpoint that is saved with wrong arguments."""

    def call(bad: bool) -> None:
        arguments = {"root": folder(), "iteration": 1, **(wrong if bad else {})}
        made, optimizer = both()
        save_checkpoint(made, optimizer, **arguments)

    return call


def saves_extra(error: BaseException) -> Call:
    return lambda bad: save_checkpoint(*both(), folder(), iteration=1, extra={"e": Extra(error if bad else None)})


def raises_while_written(error: BaseException) -> Call:
    def call(bad: bool) -> None:
        place, pair = folder(), both()

        def fsync(_: int) -> None:
            raise error

        with mock.patch.object(os, "fsync", fsync) if bad else nullcontext():
            save_checkpoint(*pair, place, iteration=1)

    return call


def loads(**wrong: Any) -> Call:
    def call(bad: bool) -> None:
        place, pair = folder(), both()
        save_checkpoint(*pair, place, iteration=1)
        arguments = {"model": pair[0], "optimizer": pair[1], "root": place, **(wrong if bad else {})}
        load_checkpoint(**arguments)

    return call


def checkpointer(**wrong: Any) -> Call:
    return lambda bad: Checkpointer(folder(), **(wrong if bad else {})).save(1, *both())


def saves_hf(**wrong: Any) -> Call:
    def call(bad: bool) -> None:
        place = folder()
        save_hf(**{"model": model(), "folder": f"{place}/hf", **(wrong if bad else {})})

    return call


def loads_hf(**wrong: Any) -> Call:
    def call(bad: bool) -> None:
        place, made = folder(), model()
        save_hf(made, f"{place}/hf")
        load_hf(**{"model": made, "folder": f"{place}/hf", **(wrong if bad else {})})

    return call


def optimizer_of(*more: nn.Parameter) -> Call:
    """An optimizer that holds more than the parameters of the model."""

    def call(bad: bool) -> None:
        made = model()
        fully_shard_optimizer(torch.optim.SGD([*made.parameters(), *(more if bad else ())], lr=0.1))

    return call


CONFIGS: dict[str, Callable[..., Any]] = {
    "FSDP2": am.FSDP2Config,
    "MegatronFSDP": am.MegatronFSDPConfig,
    "DDP": am.DDPConfig,
}


def config_of_llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def from_config(kind: str, **wrong: Any) -> Call:
    def call(bad: bool) -> None:
        arguments = {"config": config_of_llama(), "distributed_config": CONFIGS[kind](backend="gloo")}
        am.AutoModelForCausalLM.from_config(**{**arguments, **(wrong if bad else {})})

    return call


def from_pretrained(kind: str) -> Call:
    def call(bad: bool) -> None:
        place = folder()
        if dist.get_rank() == 0:
            config_of_llama().save_pretrained(place)
        dist.barrier()
        strategy = CONFIGS[kind](backend="gloo")
        am.AutoModelForCausalLM.from_pretrained(missing() if bad else place, distributed_config=strategy)

    return call


def of_automodel(kind: str) -> nn.Module:
    return am.AutoModelForCausalLM.from_config(
        config=config_of_llama(), distributed_config=CONFIGS[kind](backend="gloo")
    )


def connects(kind: str, **wrong: Any) -> Call:
    """An optimizer that is connected to a model of automodel."""

    def call(bad: bool) -> None:
        made = of_automodel(kind)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        am.connect_optimizer(**{"model": made, "optimizer": optimizer, **(wrong if bad else {})})

    return call


def clips(kind: str, **wrong: Any) -> Call:
    """Gradients of a model of automodel that are clipped."""

    def call(bad: bool) -> None:
        made, ids = of_automodel(kind), torch.arange(8)[None]
        made(input_ids=ids, labels=ids).loss.backward()
        am.clip_grad_norm_(**{"parameters": made, "max_norm": 1.0, **(wrong if bad else {})})

    return call


def clips_own(*wrong: Any, **given: Any) -> Call:
    """Gradients of a sharded model that are clipped."""
    return lambda bad: trained(**given).clip_grad_norm_(*(wrong if bad else (1.0,)))


def clips_beside(kind: str) -> Call:
    """Gradients that are clipped by ranks of which none shards with another: they are replicas, or tensor-parallel."""

    def call(bad: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("all", "one"))
        replicas = {"dp_outer_dim": "all", "hybrid_fsdp_group": dist.group.WORLD}
        dims = {"tp_dim": "all"} if kind == "tensor-parallel" else replicas
        trained(device_mesh=mesh, dp_shard_dim="one", **dims).clip_grad_norm_(0.5 if bad else 1.0)

    return call


def clips_by_torch(bad: bool) -> None:
    made = trained()
    if bad:
        next(made.parameters()).grad = None
    torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)


def counts(labels: Any, **named: Any) -> Call:
    right = torch.ones(2, 4, dtype=torch.int64)
    return lambda bad: am.count_label_tokens(labels if bad else right, dist.group.WORLD, **{"shifted": False, **named})


# ---- the table -------------------------------------------------------------------------------------------------------

MODEL_ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "zero_dp_strategy": (9, 3),
    "outer_dp_sharding_strategy": (1, 0),
    "device_mesh": ("cpu", None),
    "tp_dim": (7, None),
    "fsdp_unit_modules": (["no.such.Class"], [nn.Linear]),
    "device": ("nothing", None),
    "weight_allocator": ("heap", "slots"),
    "verify_ranks": ("sometimes", None),
    "deterministic": ("yes", None),
    "offload": ({"main_weights": "cloud"}, ["main_weights"]),
    "expt_device_mesh": ("x", None),
    "sync_model_each_microbatch": (False, True),
    "preproc_state_dict_for_dcp_ckpt": (False, True),
    "cuda_graph_mode": (True, False),
}


def calls() -> dict[str, Call]:
    table: dict[str, Call] = {}
    for name, (wrong, right) in MODEL_ARGUMENTS.items():
        for make in (model, both):
            table[f"{make.__name__}({name})"] = given(name, wrong, right, make)
    table |= {
        "model(check_for_nan_in_grad)": lambda bad: model(
            report_nan_in_param_grad=True, check_for_nan_in_grad=False if bad else None
        ),
        "model(other strategy)": given("zero_dp_strategy", 2, 3),
        "model(other units)": given("fsdp_unit_modules", [], [nn.Linear]),
        "model(other dtype)": given(
            "mixed_precision_policy", MixedPrecisionPolicy(main_grads_dtype=torch.float64), MixedPrecisionPolicy()
        ),
        "model(other factor)": given("calculate_per_token_loss", True, False),
        "model(a buffer more)": changed(lambda module: module.register_buffer("counter", torch.zeros(1))),
        "model(tied)": changed(lambda module: setattr(module[1], "weight", module[0].weight)),
        "model(meta)": changed(lambda module: module.to("meta")),
        "model(sharded)": changed(lambda module: setattr(module[0].weight, "_megatron_fsdp_model", None)),
        "model(no parameters)": lambda bad: fully_shard_model(nn.ReLU() if bad else net()),
        "model(unknown)": lambda bad: model(**({"nothing": 1} if bad else {})),
        "model(wrapped)": lambda bad: fully_shard_model(nn.DataParallel(net()) if bad else net()),
        "fully_shard(no optimizer)": lambda bad: fully_shard(*([net()] if bad else both_of())),
        "fully_shard(class)": lambda bad: fully_shard(*((net(), torch.optim.SGD) if bad else both_of())),  # type: ignore[arg-type]
        "fully_shard(other optimizer)": lambda bad: fully_shard(
            (module := net()), torch.optim.SGD((net() if bad else module).parameters(), lr=0.1)
        ),
        "fully_shard(other class)": lambda bad: fully_shard(
            (module := net()), (AdamW8bit if bad else torch.optim.SGD)(module.parameters(), lr=0.1)
        ),
        "fully_shard(other order)": lambda bad: fully_shard(
            (module := net()), torch.optim.SGD([*module.parameters()][:: -1 if bad else 1], lr=0.1)
        ),
        MESSAGE_VARIABLE: with_variable(MESSAGE_VARIABLE, "x"),
        "without memory 0": without_memory(lambda pair: fully_shard(*pair), make=both_of),
        "parameter_statistics(memory)": without_memory(MegatronFSDP.parameter_statistics, 1, (statistics, "_row")),
        "gradient_statistics(memory)": without_memory(MegatronFSDP.gradient_statistics, 1, (statistics, "_row")),
        "parameter_digests(memory)": without_memory(MegatronFSDP.parameter_digests, 1, (statistics, "digest")),
        "full_parameters_context(memory)": without_memory(lambda made: shown(made, None)),
        "full_parameters_context(memory of a cast)": without_memory(
            lambda made: shown(made, None, compute_dtype=True), 1, (torch.Tensor, "to")
        ),
        "full_parameters(memory)": without_memory(MegatronFSDP.full_parameters, 1),
        "full_gradients(memory)": without_memory(MegatronFSDP.full_gradients, 1),
        "iter_full_tensors(memory)": without_memory(lambda made: list(made.iter_full_tensors(1)), 1),
        "check_parity(steps)": given("steps", 0, 1, parity),
        "check_parity(other steps)": given("steps", 2, 1, parity),
        "check_parity(device)": given("device", "nothing", "cpu", parity),
        "fully_shard_optimizer(foreign)": optimizer_of(nn.Parameter(torch.ones(2))),
        "fully_shard_optimizer(unsharded)": lambda bad: (
            made := model(),
            fully_shard_optimizer(torch.optim.SGD((net() if bad else made).parameters(), lr=0.1)),
        ),
        "MegatronFSDP(index)": lambda bad: of_index(net(), *([None] if bad else [])),
        "DDP(config)": lambda bad: DistributedDataParallel(
            None if bad else DistributedDataParallelConfig(),  # type: ignore[arg-type]
            net(),
        ),
        "DDP(fsdp_unit_modules)": given("fsdp_unit_modules", [nn.Linear], None, ddp),
        "DDP(device_mesh)": given("device_mesh", 3, None, ddp),
        "torch's clip_grad_norm_(a gradient is None)": clips_by_torch,
        "count_label_tokens(shape)": counts(torch.ones(3)),
        "full_parameters_context(foreign)": lambda bad: shown(model(), net() if bad else None),
        "full_parameters_context(options)": lambda bad: shown(model(), None, compute_dtype=bad, writeback=True),
        "iter_full_tensors(bytes)": lambda bad: list(model().iter_full_tensors(0 if bad else 100)),
        "log_for_hangs(timeout)": lambda bad: model().log_for_hangs(folder_here(), timeout_s=-1 if bad else 10),
        "log_for_hangs(twice)": logs_twice,
        "reset_mixed_precision_policy(main)": lambda bad: stepping(
            lambda made: made.reset_mixed_precision_policy(
                MixedPrecisionPolicy(main_grads_dtype=torch.float16 if bad else None)
            )
        ),
        "reset_mixed_precision_policy(other)": lambda bad: stepping(
            lambda made: made.reset_mixed_precision_policy(
                MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16 if bad else torch.float32)
            )
        ),
        "load_state_dict(assign)": lambda bad: loads_foreign(assign=bad),
        "optimizer.load_state_dict(text)": loads_optimizer("x"),
        "optimizer.load_state_dict(length)": loads_optimizer({"state": {}, "param_groups": [{"params": [0, 1]}]}),
        "optimizer.load_state_dict(not cut)": loads_foreign_state,
        "Checkpointer(keep_last)": checkpointer(keep_last=0),
        "save_checkpoint(iteration)": saves(iteration=-1),
        "save_checkpoint(model)": of_model(lambda made: save_checkpoint(made, None, missing(), iteration=1)),
        "save_checkpoint(extra)": saves(extra=3),
        "save_checkpoint(long text)": saves_extra(ValueError("x" * 3_000_000)),
        "save_checkpoint(mute)": saves_extra(MuteError()),
        "save_checkpoint(exit)": saves_extra(SystemExit(3)),
        "save_checkpoint(handler)": saves_extra(LoudError(cannot_be_unpickled=True)),
        "written(OSError)": raises_while_written(OSError(28, "No space left on device")),
        "written(handler)": raises_while_written(LoudError(cannot_be_unpickled=True)),
        "load_checkpoint(missing)": loads(root="/no/such/folder"),
        "load_checkpoint(iteration)": loads(iteration="x"),
        "load_checkpoint(model)": loads(model=None),
        "save_hf(max_shard_bytes)": saves_hf(max_shard_bytes=0),
        "save_hf(model)": saves_hf(model=3),
        "save_hf(other dtype)": saves_hf(dtype=torch.bfloat16),
        "load_hf(missing)": loads_hf(folder="/no/such/folder"),
        "load_hf(model)": loads_hf(model=3),
        "save_adapter(model)": of_model(lambda made: save_adapter(made, missing())),
        "load_adapter(model)": of_model(lambda made: load_adapter(made, missing())),
        "WeightSource(destination)": given("destination", 9, "all", passes),
        "WeightSource(bucket_bytes)": given("bucket_bytes", 0, 100, passes),
        "WeightSource(device)": given("device", "nothing", "cpu", passes),
        "DistributedOptimizer(clip_grad)": given("clip_grad", "x", 1.0, distributed_optimizer),
        "DistributedOptimizer(model)": given("model", 3, None, distributed_optimizer),
        "trace(steps)": given("steps", 0, 1, traces),
        "trace(model)": given("model", 3, None, traces),
        "experimental.save_checkpoint(optimizer)": given("optimizer", 3, None, saves_in_place),
        "experimental.fully_shard_context(first call)": given("divisors", (0, 1), (1, 1), shards_in_place),
        "experimental.fully_shard_context(second call)": given("divisors", (1, 0), (1, 1), shards_in_place),
        "MegatronFSDPManager(model)": manages("MegatronFSDP"),
        "FSDP2Manager(model)": manages("FSDP2"),
        "DDPManager(model)": manages("DDP"),
        "send(packed_bytes)": lambda bad: send(WeightSource(model()), None, packed_bytes="x" if bad else 100),  # type: ignore[arg-type]
        "fsdp2.fully_shard_optimizer(type)": given("optimizer", 3, None, connects_in_place),
        "fsdp2.fully_shard_optimizer(other class)": lambda bad: fsdp2.fully_shard_optimizer(
            (AdamW8bit if bad else torch.optim.SGD)(in_place()[0].parameters(), lr=0.1)
        ),
        "meet_ranks(model)": lambda bad: meet_ranks(3 if bad else model(ranks_may_skip_units=True)),
        "create_distributed_setup_from_config(strategy)": lambda bad: am.create_distributed_setup_from_config(
            {"strategy": "nothing" if bad else "fsdp2", "backend": "gloo"}
        ),
        "parallelize_model(context)": given("context", 3, None, parallelizes),
        "create_ring_ulysses_mesh(degrees)": given("ring_degree", 5, 1, rings),
        "build_mesh_context(sizes)": given("tp_size", 5, 1, meshes),
        "build_mesh_context(other sizes)": lambda bad: meshes(tp_size=dist.get_world_size() if bad else 1),
        "build_mesh_context(config)": given("config", 3, am.FSDP2Config(backend="gloo"), meshes),
        "shard_batch(mesh)": given("cp_mesh", 3, None, cuts),
        "shard_batch(batch)": given("batch", 3, None, cuts),
        "unshard_sequence(type)": given("tensor", 3, torch.ones(1, 4), unshards),
        "unshard_sequence(other shape)": given("tensor", torch.ones(1, 8), torch.ones(1, 4), unshards),
        "unshard_sequence(dim)": given("dim", 9, 1, unshards),
        "unshard_sequence(mesh)": given("cp_mesh", 3, None, unshards),
        "uneven: full tensor(type)": lambda bad: uneven.uneven_dtensor_to_full_tensor(3 if bad else cut()),  # type: ignore[arg-type]
        "uneven: redistribute(type)": lambda bad: uneven.redistribute_uneven_dtensor_to_replicated(3 if bad else cut()),  # type: ignore[arg-type]
    }
    for strategy in (0, 1, 3):
        of = f"strategy {strategy}"
        table |= {
            f"clip_grad_norm_({of}, text)": clips_own("x", zero_dp_strategy=strategy),
            f"clip_grad_norm_({of}, norm_type text)": clips_own(1.0, "x", zero_dp_strategy=strategy),
            f"clip_grad_norm_({of}, other max_norm)": clips_own(0.5, zero_dp_strategy=strategy),
            f"clip_grad_norm_({of}, other norm_type)": clips_own(1.0, 1.0, zero_dp_strategy=strategy),
            f"clip_grad_norm_({of}, other error_if_nonfinite)": clips_own(1.0, 2.0, True, zero_dp_strategy=strategy),
        }
    table |= {
        f"clip_grad_norm_({kind}, other max_norm)": clips_beside(kind) for kind in ("replicas", "tensor-parallel")
    }
    table["clip_grad_norm_(deterministic, infinity)"] = clips_own(1.0, math.inf, deterministic="world")
    for kind in CONFIGS:
        table |= {
            f"connect_optimizer({kind}, foreign)": connects(kind, optimizer=both_of()[1]),
            f"connect_optimizer({kind}, model)": connects(kind, model=3),
            f"automodel clip_grad_norm_({kind}, text)": clips(kind, max_norm="x"),
            f"automodel clip_grad_norm_({kind}, other max_norm)": clips(kind, max_norm=0.5),
            f"automodel clip_grad_norm_({kind}, parameters)": clips(kind, parameters=3),
            f"from_config({kind}, strategy)": from_config(kind, distributed_config="x"),
            f"from_config({kind}, device_mesh)": from_config(kind, device_mesh=3),
            f"from_config({kind}, prepare)": from_config(kind, prepare_model=fails),
            f"from_pretrained({kind}, folder)": from_pretrained(kind),
        }
    return table


def both_of() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = net()
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def folder_here() -> str:
    return tempfile.mkdtemp()


def fails(*_: Any) -> None:
    raise KeyError("mine")


def shown(made: MegatronFSDP, module: nn.Module | None, **options: Any) -> None:
    with made.full_parameters_context(module, **options):
        pass


def logs_twice(bad: bool) -> None:
    made = model()
    made.log_for_hangs(folder_here())
    if not bad:
        made.stop_logging_for_hangs()
    made.log_for_hangs(folder_here())


def stepping(change: Callable[[MegatronFSDP], None]) -> None:
    """Change a model, then train it."""
    made = model()
    change(made)
    step(made)


def loads_foreign(**wrong: Any) -> None:
    """Load DTensors that torch has cut, which takes all ranks."""
    made = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 8 // dist.get_world_size()
    cut_by_torch = DTensor.from_local(torch.ones(rows, 8), mesh, [Shard(0)], run_check=False)
    state = {**made.state_dict(), "module.0.weight": cut_by_torch}
    made.load_state_dict(**{"state_dict": state, **wrong})


def loads_optimizer(wrong: Any) -> Call:
    def call(bad: bool) -> None:
        _made, optimizer = both()
        optimizer.load_state_dict(wrong if bad else optimizer.state_dict())

    return call


def passes(**given: Any) -> None:
    list(WeightSource(model(), **given))


def parity(**given: Any) -> None:
    check_parity(
        net, torch.ones(12, 8), loss_fn=loss_of, **{"steps": 1, "strategies": (0,), "checkpoint": False, **given}
    )


def loss_of(made: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return made(batch).square().mean()


def distributed_optimizer(**given: Any) -> None:
    made = ddp()
    arguments = {"model": made, **{name: value for name, value in given.items() if value is not None}}
    DistributedOptimizer(torch.optim.SGD(made.parameters(), lr=0.1), **arguments)


def meshes(**given: Any) -> None:
    am.build_mesh_context(**{"config": am.FSDP2Config(backend="gloo"), **given})


def traces(model: Any = None, steps: int = 1) -> None:
    trace(fully_shard_model(nn.Linear(8, 8)) if model is None else model, steps=steps)


def in_place() -> tuple[nn.Module, torch.optim.Optimizer]:
    made = fsdp2.fully_shard(nn.Linear(8, 8))
    return made, torch.optim.Adam(made.parameters())


def saves_in_place(optimizer: Any) -> None:
    made, own = in_place()
    made(torch.ones(2, 8)).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        experimental.save_checkpoint(made, own if optimizer is None else optimizer, of_ranks(folder)[0])


def shards_in_place(divisors: tuple[int, int]) -> None:
    made, cut, mesh = net(), [Shard(0)], init_device_mesh("cpu", (dist.get_world_size(),))
    with experimental.fully_shard_context("cpu"):
        for module, divisor in zip(made.children(), divisors, strict=True):
            placements = experimental.Placements([0], cut, cut, cut)
            experimental.fully_shard(module, mesh, placements, grad_divisor=divisor)


def manages(kind: str) -> Call:
    """A model that a manager of automodel makes parallel."""
    from transformers import LlamaForCausalLM

    def call(bad: bool) -> None:
        config = CONFIGS[kind](backend="gloo")
        given = {} if kind == "DDP" else {"device_mesh": am.build_mesh_context(config=config).device_mesh}
        made = LlamaForCausalLM(config_of_llama())
        getattr(am, f"{kind}Manager")(config, **given).parallelize(3 if bad else made)

    return call


def parallelizes(context: Any) -> None:
    from transformers import LlamaForCausalLM

    right = am.build_mesh_context(config=am.FSDP2Config(backend="gloo"))
    am.parallelize_model(LlamaForCausalLM(config_of_llama()), right if context is None else context)


def connects_in_place(optimizer: Any) -> None:
    _made, own = in_place()
    fsdp2.fully_shard_optimizer(own if optimizer is None else optimizer)


def rings(ring_degree: int) -> None:
    size = dist.get_world_size()
    am.create_ring_ulysses_mesh(
        init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), ring_degree=ring_degree, ulysses_degree=size
    )


def cuts(**given: Any) -> None:
    """A batch that is cut over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    right = {"batch": {"input_ids": torch.arange(24).view(1, 24)}, "cp_mesh": mesh}
    am.shard_batch(**right | {name: value for name, value in given.items() if value is not None})


def unshards(**given: Any) -> None:
    right = {"tensor": torch.ones(1, 4), "cp_mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    am.unshard_sequence(**right | {name: value for name, value in given.items() if value is not None})


def loads_foreign_state(bad: bool) -> None:
    """Load state that torch has cut, which takes all ranks; one of them has it whole."""
    _made, optimizer = both()
    given, size = optimizer.state_dict(), dist.get_world_size()
    whole = torch.ones(8, 8)
    cut = DTensor.from_local(whole[: 8 // size], init_device_mesh("cpu", (size,)), [Shard(0)], run_check=False)
    given["state"][0]["exp_avg"] = whole if bad else cut
    optimizer.load_state_dict(given)


# ---- the tests -------------------------------------------------------------------------------------------------------


def what_came(call: Call) -> str:
    """Name the error that this rank has met."""
    try:
        call(dist.get_rank() == 1)
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "none"


def walk(names: list[str]) -> None:
    """Make the calls one after another, in a group with a limit; the gather behind each shows that nobody waits."""
    table = calls()
    set_timeout(LIMIT)
    for name in names:
        came = of_ranks(what_came(table[name]))
        others = came[:1] + came[2:]
        assert set(others) == {others[0]}, (name, came)
        assert re.search(r"\brank 1\b|\branks\b", others[0]), (name, came)  # not alike for another reason
        assert len(others[0]) < 3000, name
        kind = came[1].partition(":")[0]
        if kind in ("KeyboardInterrupt", "SystemExit", "LoudError"):  # raised as it is where it came from
            assert f"rank 1: {kind}" in others[0], (name, came)
        else:
            assert came[1] == others[0], (name, came)


NAMES = list(calls())
PARTS = {"wrapping": NAMES[:60], "the rest": NAMES[60:]}


@pytest.mark.parametrize("part", PARTS)
@on_ranks(2)
def test_what_is_wrong_on_one_rank_is_the_same_sentence_on_both(part: str) -> None:
    walk(PARTS[part])


@pytest.mark.full
@on_ranks(3)
def test_what_is_wrong_on_one_rank_is_the_same_sentence_on_three() -> None:
    walk(NAMES)


@on_ranks(3)
def test_ranks_outside_of_a_model_are_not_asked() -> None:
    """The first two ranks shard a model on their own mesh, given by place or by name; the third one has none."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("d",))
        for call in (
            lambda bad: fully_shard_model(net(), mesh, "d", zero_dp_strategy=9 if bad else 3),
            lambda bad: fully_shard(*both_of(), device_mesh=mesh, zero_dp_strategy=9 if bad else 3),
            lambda bad: fully_shard(*both_of(), mesh, "d", zero_dp_strategy=9 if bad else 3),
        ):
            assert "zero_dp_strategy=9" in what_came(call)
            assert what_came(lambda _: call(False)) == "none"  # noqa: B023
    dist.barrier()


# ---- what user code does on one rank, between collectives ------------------------------------------------------------


class Towers(nn.Module):
    """A model of images and text, whose units differ in size; without an image its tower is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.text = nn.Linear(8, 8), nn.Linear(8, 80)

    def forward(self, text: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        return self.text(text if image is None else text + self.images(image))


def sees_images_alone(bad: bool) -> None:
    """In the second step one rank has an image, and the other none."""
    torch.manual_seed(0)
    made, here = fully_shard_model(Towers(), fsdp_unit_modules=[nn.Linear]), torch.ones(2, 8)
    for image in (here, here if bad else None):
        made(here, image).sum().backward()


def skips_a_backward(bad: bool) -> None:
    made = trained()
    with made.no_sync():
        loss = made(torch.ones(2, 8)).sum()
        if not bad:
            loss.backward()
    made.finish_grad_sync()


def defers(bad: bool) -> None:
    made = trained()
    with made.no_sync() if bad else nullcontext():
        step(made)
    step(made)


class Moody(torch.optim.SGD):
    """Somebody's own."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        return super().step(closure)


def steps_moody(door: str) -> Call:
    """A model and an optimizer of somebody's own, which fails in its step."""

    def call(_bad: bool) -> None:
        made: nn.Module = net()
        if door == "fsdp2":
            for each in (*made.children(), made):
                fsdp2.fully_shard(each)
        elif door == "DDP":
            made = DistributedDataParallel(DistributedDataParallelConfig(overlap_grad_reduce=True), made)
        optimizer: Any = Moody(made.parameters(), lr=0.1)
        if door == "wrapper":
            made, optimizer = fully_shard(made, optimizer, fsdp_unit_modules=[nn.Linear])
        elif door == "DDP":
            optimizer = DistributedOptimizer(optimizer, model=made)
        step(made)
        optimizer.step()
        step(made)

    return call


def has_no_gradient(bad: bool) -> None:
    made = trained()
    if bad:
        made.zero_grad()
    torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)


def switches_alone(bad: bool) -> None:
    """What one rank calls, and the others do not."""
    made = trained(zero_dp_strategy=0)
    if bad:
        made.set_model_auto_sync(False)
    step(made)
    step(made)


TOLD: dict[str, Call] = {
    "an image": sees_images_alone,
    "a backward is skipped": skips_a_backward,
    "no_sync": defers,
    **{f"own step, {door}": steps_moody(door) for door in ("wrapper", "fsdp2", "DDP")},
    "set_model_auto_sync": switches_alone,
    "no gradient": has_no_gradient,
}


def tell(name: str) -> None:
    set_timeout(LIMIT / 3)
    TOLD[name](dist.get_rank() == 1)


@pytest.mark.full(short=["an image", "own step, wrapper"])
@pytest.mark.parametrize("name", [name for name in TOLD if name != "own step, DDP"])
def test_who_waits_for_a_rank_that_does_something_else_says_for_what(run_ranks: RunRanks, name: str) -> None:
    """At the limit of the group, or at once where gloo ends the other rank: the unit, the operation, and the cure."""
    with pytest.raises(WorkerError) as raised:
        run_ranks(2, tell, name)
    if name == "no gradient":  # torch's own function, of which the model knows nothing
        waits, cure = "while norms, sums or extremes of sharded tensors are combined", "see what it printed"
    else:
        waits, cure = (
            r"during '(gather|wait|reduce|retire)' of unit (bucket )?[\w.]+; ",
            r"calls (model\.join\(unit, hidden\) instead|it with any input)",
        )
    told = [text for text in raised.value.by_rank.values() if re.search(waits, text)]
    assert any(re.search(cure, text) for text in told), raised.value
    if name.startswith("own step"):  # rank 1 has raised, and has gone
        assert told == [raised.value.by_rank[0]]
        assert "missing: rank 1; waiting: rank 0 during '" in told[0]


@pytest.mark.full
def test_who_waits_names_the_rank_that_is_missing_of_three(run_ranks: RunRanks) -> None:
    with pytest.raises(WorkerError) as raised:
        run_ranks(3, tell, "own step, DDP")
    told = [raised.value.by_rank[rank] for rank in (0, 2)]
    assert all(re.search("missing: rank (0, )?1(, 2)?; waiting: rank ", each) for each in told), told
    # The first to fail names the other one only if that fails within two seconds; the last one knows both.
    assert any(re.search("missing: rank 1; waiting: rank 0 during .*, rank 2 during '", each) for each in told), told
