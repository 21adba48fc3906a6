"""`fully_shard` with torch's signature, translated into settings of this engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from megatron_fsdp.comm.agreement import Groups, all_agree
from megatron_fsdp.comm.collectives import default_device, resolve_device
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import EngineOptions, resolve_offload, resolve_skip_order
from megatron_fsdp.config.precision import MixedPrecisionPolicy as Policy
from megatron_fsdp.dtensor.shard_spec import local_tensor, part_of
from megatron_fsdp.engine.param_group import REPLACED
from megatron_fsdp.engine.plans import Sharding
from megatron_fsdp.engine.unit import ParameterPlace
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError, check_keys, explains_restarts, warn_caller
from megatron_fsdp.experimental.module import fully_shard_optimizer as connect
from megatron_fsdp.formats.quantized import take_quantized_apart
from megatron_fsdp.formats.tensor_extensions import tensor_extension_of
from megatron_fsdp.fsdp2.even import EvenParameter, even_shard
from megatron_fsdp.fsdp2.module import become_sharded
from megatron_fsdp.fsdp2.state import MeshPlans, ShardState, cut_into_buffers, finish_models_of, state_of
from megatron_fsdp.optim.optimizer import facts_of
from megatron_fsdp.sharding.placement import placements_for
from megatron_fsdp.wrap.shard_unit import check_not_wrapped
from megatron_fsdp.wrap.wrap import move_buffers

Modules = TypeVar("Modules", bound=nn.Module | list[nn.Module])


def _ranks_of(optimizer: object) -> Groups:
    """Return the groups of the first sharded parameter of an optimizer; all ranks where there is none."""
    params = (param for group in getattr(optimizer, "param_groups", ()) for param in group["params"])
    mesh = next((param.device_mesh for param in params if isinstance(param, DTensor)), None)
    return () if mesh is None else tuple(mesh.get_group(dim) for dim in range(mesh.ndim))


def fully_shard_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Connect an optimizer that computes with whole tensors, such as torch's Muon, to the engine. Collective.

    Any other may be connected, too. If the model has not run yet, it is sharded into the engine's buffers now.

    Returns:
        The same optimizer.
    """
    with all_agree("connecting the optimizer", _ranks_of(optimizer)) as facts:
        finish_models_of(optimizer)
        connect(optimizer)
        facts |= facts_of(optimizer)
    return optimizer


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: object = None,
    ranks_may_skip_units: bool | Sequence[nn.Module] = False,
) -> Modules:
    """Shard the parameters of a module in place, as `torch.distributed.fsdp.fully_shard` does; no communication.

    Call it for inner modules first: a call takes the parameters that no earlier call has taken. Until the first
    forward parameters are stock DTensors with torch's even cut, on the meta device, too; then, unit by unit, they are
    cut again into the engine's flat buffers, and stay the same objects. Small neighbours that were called and set alike
    become one unit.

    Args:
        module: A module, or a list of modules that are gathered together. Its class becomes a subclass that is torch's
            `FSDPModule`, too.
        mesh: The data-parallel ranks: of one dimension, or of two (replicate, shard). None: all ranks, on the
            accelerator if there is one.
        reshard_after_forward: Let other units take the memory of its full parameters after forward, or keep them until
            the backward is over. None: True, but for the root. A number of ranks counts as True.
        shard_placement_fn: A `Shard(dim)` is checked, and has no effect, since buffers are flat. A
            `ShardPlacementResult` gives a parameter another mesh, as for experts.
        mp_policy: torch's policy: dtypes of compute, reduction and results, and whether inputs are cast.
        offload_policy: `CPUOffloadPolicy()` keeps weights, gradients and optimizer state in host memory.
        ignored_params: Parameters that stay as they are.
        dp_mesh_dims: Not supported.
        ranks_may_skip_units: Of the outermost module: let ranks call different units; as of `fully_shard_model`. Not
            in torch's.

    Returns:
        Its first argument.

    Raises:
        ConfigurationError: The module was sharded already, shares a parameter with one that was, is a container
            without a forward, or an argument is out of range (a ValueError). Nothing has changed then.
        NotSupportedYetError: A parameter would be replicated only, or `dp_mesh_dims` is given (a NotImplementedError).
    """
    modules: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    for each in modules:
        _check_module(each)
        resolve_skip_order(ranks_may_skip_units, each)
    if not modules or len(set(map(id, modules))) < len(modules):
        found = "one of the modules was given twice" if modules else "no modules were given"
        raise ConfigurationError(f"{found}; give one or more, and give each once")
    if dp_mesh_dims is not None:
        raise NotSupportedYetError(
            "dp_mesh_dims: give mesh=mesh[names] of the data-parallel dimensions, and parameters as DTensors over the "
            "tensor-parallel one"
        )
    mp_policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy={mp_policy!r} is no torch.distributed.fsdp.MixedPrecisionPolicy; give that")
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise TypeError(f"offload_policy={offload_policy!r} is no OffloadPolicy; give CPUOffloadPolicy() or nothing")
    mesh = _all_ranks() if mesh is None else mesh
    _check_mesh(mesh)
    ignored = frozenset(map(id, ignored_params or ()))
    take_quantized_apart(modules, ignored)
    owned = list(_owned(modules, ignored))
    meshes = _meshes(shard_placement_fn, [param for _, param, _ in owned], mesh)
    tensor_parallel = next((param.device_mesh for _, param, _ in owned if isinstance(param, DTensor)), None)
    plans, *own_plans = (MeshPlans.of(each, tensor_parallel) for each in (mesh, *meshes))
    sharding, *shardings = (
        _sharding(each, mp_policy, offload_policy, resolve_device(None, mesh.device_type))
        for each in (plans, *own_plans)
    )
    stays_even = not _has_extensions(
        owned, plans, sharding
    )  # tensor classes gather in their own way, so they are cut now
    held_on = torch.device("cpu") if sharding.options.offload else sharding.device
    reshards = _checked_reshard(reshard_after_forward, plans.mesh.axes[-1].num_ranks)
    parts = [part_of(name, param, plans.mesh.tensor_parallel) for name, param, _ in owned]
    shards = [
        even_shard(param, part, own.rank_mesh, held_on) if stays_even else param
        for (_, param, _), part, own in zip(owned, parts, shardings, strict=True)
    ]
    # Nothing can fail from here on.
    params = [
        EvenParameter(name, owners, part, local_tensor(param).shape, own)
        for (name, param, owners), part, own in zip(owned, parts, shardings, strict=True)
    ]
    for even, shard, (name, param, _) in zip(params, shards, owned, strict=True):
        if shard is not param:
            setattr(param, REPLACED, name)
            even.set(shard)
            even.follow_state_dicts()
    inside = [inner for each in modules for inner in each.modules()]
    # Places instead of parameters: other objects may be put there, as from the meta device.
    left_out = [
        ParameterPlace.of(inner, attribute)
        for inner in inside
        for attribute, param in inner._parameters.items()
        if id(param) in ignored
    ]
    inner_states = list(dict.fromkeys(state for each in inside if (state := state_of(each)) is not None))
    state = ShardState(modules, params, inner_states, (plans, *own_plans), sharding, mp_policy, reshards, left_out)
    state.ranks_may_skip_units = ranks_may_skip_units
    for each in modules:
        move_buffers(each, sharding.device)
        for inner in each.modules():
            inner.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)  # for dynamo
        become_sharded(each, state)
    if not stays_even:
        cut_into_buffers([state])
    return module


fully_shard.state = torch_fully_shard.state  # type: ignore[attr-defined]  # as clients call it


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{module!r} is no module; give a torch.nn.Module or a list of them")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigurationError(
            f"fully_shard does not support containers that do not implement forward: {type(module).__name__}; give "
            "its modules, as a list to gather them together"
        )
    if state_of(module) is not None:
        raise ConfigurationError(f"this {type(module).__name__} is sharded already; shard a module once")
    check_keys(name for name, _ in (*module.named_parameters(), *module.named_buffers()))
    for name, inner in module.named_modules():
        state = state_of(inner)
        if state is None:
            if isinstance(inner, FSDPModule):
                check_not_wrapped(inner)
        elif state.root.is_finished:
            raise ConfigurationError(
                f"{name} of {type(module).__name__} has run already, as the root of its own; shard all modules before "
                "the first forward"
            )


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r} is not a DeviceMesh; give one, or nothing for all ranks")
    if mesh.ndim not in (1, 2):
        raise ConfigurationError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}; slice it by its names")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


def _all_ranks() -> DeviceMesh:
    if not dist.is_initialized():
        with explains_restarts():
            dist.init_process_group()
    return init_device_mesh(default_device().type, (dist.get_world_size(),))


def _owned(
    modules: list[nn.Module], ignored: frozenset[int]
) -> Iterator[tuple[str, nn.Parameter, tuple[ParameterPlace, ...]]]:
    """Iterate over the parameters that a call takes: name, parameter and owners; each once."""

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter, nn.Module, str]]:
        for attribute, param in module._parameters.items():
            if param is not None and id(param) not in ignored:
                yield prefix + attribute, param, module, attribute
        for name, child in module._modules.items():
            if child is not None and state_of(child) is None:
                yield from walk(child, f"{prefix}{name}.")

    found: dict[int, tuple[str, nn.Parameter, dict[tuple[int, str], ParameterPlace]]] = {}
    for module in modules:
        for name, param, owner, attribute in walk(module, f"{type(module).__name__}."):
            _check_parameter(name, param)
            _, _, owners = found.setdefault(id(param), (name, param, {}))
            owners[id(owner), attribute] = ParameterPlace.of(owner, attribute)
    return ((name, param, tuple(owners.values())) for name, param, owners in found.values())


def _check_parameter(name: str, param: nn.Parameter) -> None:
    if (taken := getattr(param, REPLACED, None)) is not None:
        raise ConfigurationError(
            f"{name} is tied to {taken}, which another call has sharded already, and would be two parameters from now "
            "on; shard the modules that share it by one call: fully_shard([first, second])"
        )
    if isinstance(param, UninitializedParameter):
        raise ConfigurationError(
            f"{name} is not initialised yet; run one forward before sharding, so that lazy modules know their shapes"
        )


def _has_extensions(
    owned: list[tuple[str, nn.Parameter, tuple[ParameterPlace, ...]]], plans: MeshPlans, sharding: Sharding
) -> bool:
    """Return True if a tensor class is gathered in its own way; raise if the setup does not support that."""
    found = False
    for name, param, (owner, *_) in owned:
        module = owner.module()
        assert module is not None
        if tensor_extension_of(name, param, module) is None:
            continue
        found = True
        if param.is_meta or plans.mesh.tensor_parallel is not None or sharding.options.offload:
            raise NotSupportedYetError(
                f"{name} is a {type(param).__name__}, which is gathered in its own way; that is not done from the meta "
                "device, beside tensor parallelism, or with offloaded weights; give a plain parameter"
            )
    return found


def _meshes(
    choose: Callable[[nn.Parameter], Any] | None, params: list[nn.Parameter], mesh: DeviceMesh
) -> list[DeviceMesh]:
    """Return the data-parallel mesh of each parameter."""
    placements, meshes = [], []
    for param in params:
        placement: Any = None if choose is None else choose(param)
        own = mesh
        if isinstance(placement, _PLACEMENT_AND_MESH):
            placement, own = placement.placement, _mesh_of(placement.mesh_info)
        if placement is not None and not (isinstance(placement, Shard) and -param.ndim <= placement.dim < param.ndim):
            raise ConfigurationError(
                f"shard_placement_fn returned {placement} for a parameter of shape {tuple(param.shape)}; give Shard of "
                "one of its dimensions, a ShardPlacementResult, or None"
            )
        placements.append(placement)
        meshes.append(own)
    if any(placement is not None and placement.dim for placement in placements):
        warn_caller(
            "shard_placement_fn has no effect here: parameters are parts of flat buffers, whose padding does not "
            "depend on a dimension"
        )
    return meshes


_PLACEMENT_AND_MESH: Any = getattr(_fsdp_common, "ShardPlacementResult", ())  # newer than the oldest torch allowed


def _mesh_of(info: object) -> DeviceMesh:
    """Return the mesh of torch's `FSDPMeshInfo`, or `HSDPMeshInfo`."""
    if not isinstance(info, _fsdp_common.FSDPMeshInfo) or info.shard_mesh_dim != info.mesh.ndim - 1:
        raise NotSupportedYetError(
            f"shard_placement_fn gave a parameter ranks by a {type(info).__name__}; give FSDPMeshInfo(mesh, 0), or "
            "HSDPMeshInfo(mesh, 1, 0) of a mesh (replicate, shard)"
        )
    _check_mesh(info.mesh)
    return info.mesh


def _sharding(
    plans: MeshPlans, mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy | None, device: torch.device
) -> Sharding:
    """Return the sharding of a call; calls with equal arguments share one, and so its layouts."""
    strategy = ShardingStrategy.optim_grads_params
    offload = resolve_offload(offload_policy, strategy)
    key = (mp_policy.param_dtype, mp_policy.reduce_dtype, offload, device)
    if key not in plans.shardings:
        outer = ShardingStrategy.no_shard if len(plans.mesh.axes) > 1 else None
        policy = Policy(main_params_dtype=None, grad_comm_dtype=mp_policy.reduce_dtype or mp_policy.param_dtype)
        plans.shardings[key] = Sharding(
            options=EngineOptions(policy=policy, offload=offload),
            rank_mesh=plans.mesh,
            placements=placements_for(strategy, outer),
            device=device,
            divisor=plans.mesh.num_ranks,
            compute_dtype=mp_policy.param_dtype,
        )
    return plans.shardings[key]


def _checked_reshard(given: object, num_ranks: int) -> bool | None:
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise ConfigurationError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {given}"
        )
    if given < 1 or num_ranks % given:
        raise ConfigurationError(
            f"If passing reshard_after_forward as an int, it should be a factor of {num_ranks}, not {given}"
        )
    if 1 < given < num_ranks:
        warn_caller(f"reshard_after_forward={given} counts as True: weights are kept in one layout, over all ranks")
    return given > 1
