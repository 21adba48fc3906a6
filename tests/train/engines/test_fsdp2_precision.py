import torch

from megatron_fsdp.train.engines.fsdp2 import policy_of
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import Layer, assemble
from megatron_fsdp.train.options.presets import find_preset
from megatron_fsdp.train.options.resolve import resolve
from tests.train.engines.runs import DECODER, job_of

FSDP2 = {"use_torch_fsdp2": True}


def dtypes(job: Job) -> tuple[torch.dtype | None, torch.dtype | None]:
    policy = policy_of(job)
    return policy.param_dtype, policy.reduce_dtype


def test_gradients_travel_in_float32_unless_told() -> None:
    assert dtypes(job_of({**DECODER, **FSDP2}, 2)) == (torch.float32, torch.float32)
    assert dtypes(job_of({**DECODER, **FSDP2, "bf16": True}, 2)) == (torch.bfloat16, torch.float32)
    told = job_of({**DECODER, **FSDP2, "bf16": True, "grad_reduce_in_bf16": True}, 2)
    assert dtypes(told) == (torch.bfloat16, torch.bfloat16)


def test_a_preset_sends_bfloat16_only_where_the_hardware_multiplies_it() -> None:
    options = assemble((Layer("preset tiny", find_preset("tiny")), Layer("command line", FSDP2)))
    assert dtypes(resolve(options, World(2, "cpu", multiplies_bf16=False))) == (torch.float32, torch.float32)
    assert dtypes(resolve(options, World(2, "cpu", multiplies_bf16=True))) == (torch.bfloat16, torch.bfloat16)
