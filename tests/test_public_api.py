"""Names, order and defaults of the public API, and what importing it does not do. Clients inspect these signatures."""

import inspect
import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import megatron_fsdp
from megatron_fsdp import MixedPrecisionPolicy
from tests.support.settling import LIMIT_S
from tests.support.source_tree import SOURCE

MODEL_ARGUMENTS = """device_mesh=None, dp_shard_dim=None, dp_outer_dim=None, tp_dim=None, hybrid_fsdp_group=None,
hybrid_fsdp_expt_group=None, expt_device_mesh=None, fsdp_group_ag=None, expt_fsdp_group_ag=None, fsdp_unit_modules=None,
zero_dp_strategy=3, outer_dp_sharding_strategy=0, device=None, init_model_with_meta_device=False,
mixed_precision_policy=POLICY, overlap_grad_reduce=True, overlap_param_gather=True, sync_model_each_microbatch=True,
preproc_state_dict_for_dcp_ckpt=True, report_nan_in_param_grad=False, average_in_collective=False,
disable_bucketing=False, calculate_per_token_loss=False, keep_fp8_transpose_cache=False, nccl_ub=False,
fsdp_double_buffer=False, fsdp_db_use_persist_buf_on_alloc_fail=False, disable_symmetric_registration=False,
enable_fine_grained_param_gather=False, use_decoupled_grad=False, cuda_graph_mode=False, maxpool_double_buffer=False,
grad_reduce_in_fp32=None, preserve_fp32_weights=None, check_for_nan_in_grad=None,
keep_fp8_transpose_cache_when_using_custom_fsdp=None"""
OWN_ARGUMENTS = """reduce_scatter_with_fp32_accumulation=False, weight_allocator='slots', max_gathered_units=None,
forward_prefetch_units=None, backward_prefetch_units=None, verify_ranks=None, find_unused_parameters=False,
deterministic=None, offload=None, ranks_may_skip_units=False"""
"""Not in the published signatures: they come last. Beside these, `zero_dp_strategy_experts` and `weight_format`."""

SIGNATURES = {
    "fully_shard_model": f"module, {MODEL_ARGUMENTS}, {OWN_ARGUMENTS}, zero_dp_strategy_experts=None",
    "fully_shard_optimizer": "optimizer, preproc_state_dict_for_dcp_ckpt=True",
    "fully_shard": f"module, optimizer, {MODEL_ARGUMENTS}, {OWN_ARGUMENTS}, zero_dp_strategy_experts=None",
    "MegatronFSDP": f"""module, dist_index, ddp_config=None, mixed_precision_policy=POLICY, fsdp_unit_modules=None,
disable_bucketing=False, device=None, calculate_per_token_loss=False, init_model_with_meta_device=False,
sync_model_each_microbatch=False, keep_fp8_transpose_cache=False, nccl_ub=False, fsdp_double_buffer=False,
fsdp_db_use_persist_buf_on_alloc_fail=False, disable_symmetric_registration=False,
enable_fine_grained_param_gather_hook=False, enable_fine_grained_param_gather_backward_hook=False,
fine_grained_recurse_module_types=None, report_nan_in_param_grad=False, {OWN_ARGUMENTS}""",
    "MixedPrecisionPolicy": "main_params_dtype=FP32, main_grads_dtype=None, grad_comm_dtype=None, weight_format=None",
    "FSDPDistributedIndex": """device_mesh, dp_shard_dim=None, dp_outer_dim=None, tp_dim=None, hybrid_fsdp_group=None,
hybrid_fsdp_expt_group=None, hsdp_outer_dp_shard=False, expt_device_mesh=None, fsdp_group_ag=None,
expt_fsdp_group_ag=None""",
    "reduce_scatter_with_fp32_accumulation": """output, input, op=SUM, group=None, async_op=False,
all_to_all_output_tensor=None""",
}
NAMED = {
    f"={value!r}": f"={name}"
    for name, value in (
        ("POLICY", MixedPrecisionPolicy(torch.float32, None, None)),
        ("FP32", torch.float32),
        ("SUM", dist.ReduceOp.SUM),
    )
}
"""Defaults that the signatures above give by a name."""

_DUNDERS = (
    "version shortversion package_name contact_names contact_emails homepage repository_url download_url description "
    "license keywords"
)
DUNDERS = [f"__{name}__" for name in _DUNDERS.split()]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_published_names_order_and_defaults(name: str) -> None:
    found = []
    for parameter in inspect.signature(getattr(megatron_fsdp, name)).parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, parameter
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        found.append(parameter.name + NAMED.get(default, default))
    assert found == " ".join(SIGNATURES[name].split()).split(", ")


def test_the_package_exports_the_published_names() -> None:
    public = {name for name in megatron_fsdp.__all__ if not name.startswith("__")}
    published = (
        "DistributedDataParallel DistributedDataParallelConfig FSDPDistributedIndex MegatronFSDP MixedPrecisionPolicy "
        "fully_shard fully_shard_model fully_shard_optimizer reduce_scatter_with_fp32_accumulation"
    )
    ours = "AdamW8bit ChainedOptimizer meet_ranks steps_whole_tensors"
    assert public == {*published.split(), *ours.split()}


def test_the_package_says_who_it_is() -> None:
    values = {name: getattr(megatron_fsdp, name) for name in DUNDERS}
    assert all(isinstance(value, str) for value in values.values())
    assert set(DUNDERS) <= set(megatron_fsdp.__all__)
    assert values["__package_name__"] == "megatron_fsdp"
    assert values["__version__"].startswith(values["__shortversion__"] + ".")
    assert values["__license__"] == "Apache-2.0"


# ---- what an import does not do --------------------------------------------------------------------------------------

_IMPORT = """
import json, logging, os, signal, sys, threading, warnings
import torch, torch.distributed
import torch.distributed.tensor, torch.distributed.device_mesh

def state():
    ours = [name for name in list(logging.root.manager.loggerDict) if name.startswith("megatron_fsdp")]
    loggers = [logging.getLogger(), *map(logging.getLogger, ours)]  # torch's own modules add handlers to theirs
    return {
        "group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
        "handlers": sum(len(logger.handlers) for logger in loggers),
        "level": logging.getLogger("megatron_fsdp").level,
        "warnings": len(warnings.filters),
        "environment": dict(os.environ),
        "random": torch.get_rng_state().sum().item(),
        "dtype": str(torch.get_default_dtype()),
        "threads": [torch.get_num_threads(), threading.active_count()],
        "interrupt": str(signal.getsignal(signal.SIGINT)),
        "excepthook": str(sys.excepthook),
    }

before = state()
from megatron_fsdp import *
after = state()
import megatron_fsdp
import megatron_fsdp.fully_shard
from megatron_fsdp.fully_shard import fully_shard_optimizer
unexpected = [name for name in ("transformers", "rich", "matplotlib", "tokenizers", "pytest") if name in sys.modules]
print(json.dumps([before, after, callable(megatron_fsdp.fully_shard), unexpected]))
"""


def test_import_has_no_side_effects() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IMPORT],
        env={"PYTHONPATH": str(SOURCE), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, after, is_callable, unexpected = json.loads(done.stdout)
    assert after == before
    assert (before["group"], before["cuda"]) == (False, False)
    assert is_callable, "after `import megatron_fsdp.fully_shard` the attribute must still be the function"
    assert unexpected == []


def test_every_module_has_the_names_that_it_exports() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "\n__all__ = " in path.read_text()]
    assert SOURCE / "megatron_fsdp" / "fully_shard.py" in files
    for path in files:
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        module = import_module(name)
        assert [each for each in module.__all__ if not hasattr(module, each)] == [], name
