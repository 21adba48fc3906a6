"""Batches go to a device without the host waiting; on a CPU nothing is copied at all."""

from typing import Any

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, LLAMA, prepare


class _Copies(TorchFunctionMode):
    """Notes of every `Tensor.to` of a tensor on the CPU whether it lets the host go on."""

    def __init__(self, batch_of: set[int]) -> None:
        super().__init__()
        self.batch_of, self.found = batch_of, list[bool]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args[0].data_ptr() in self.batch_of:
            self.found.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def copies_of_a_step(values: dict[str, Any]) -> list[bool]:
    run = prepare(values)
    batches = run.feed.batches(0)
    factors = [batch.weights.clone() for batch in batches]
    taken = [*factors, *(batch.inputs for batch in batches), *(batch.targets for batch in batches)]
    with _Copies({tensor.data_ptr() for tensor in taken}) as copies:
        run.trained.accumulate(batches, factors)
    return copies.found


@pytest.mark.parametrize(
    "values",
    [
        {**DECODER, "use_megatron_fsdp": True},
        {**LLAMA, "use_torch_fsdp2": True, "pipeline_model_parallel_size": 2},
    ],
)
def test_inputs_targets_and_factors_are_copied_beside_the_host(run_ranks: RunRanks, values: dict[str, Any]) -> None:
    microbatches = 2 if "use_megatron_fsdp" in values else 3
    for found in run_ranks(2, copies_of_a_step, values):
        assert found == [True] * (3 * microbatches)
