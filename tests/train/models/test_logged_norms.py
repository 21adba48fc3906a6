"""`--log-params-norm` and `--log-num-zeros-in-grad`: any ranks measure what one process does."""

from typing import Any

import pytest
import torch

from megatron_fsdp.train.loop import train
from tests.conftest import RunRanks
from tests.train.models.runs import DECODER, LLAMA, MIXTRAL, NoCheckpoints, Silent, prepare, train_plainly

UNTIED = {**DECODER, "untie_embeddings_and_output_weights": True}
ASKED = {"log_params_norm": True, "log_num_zeros_in_grad": True}
UNITS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
BUCKETS = {"overlap_grad_reduce": True}
FSDP2 = {"use_torch_fsdp2": True}


def logged(values: dict[str, Any]) -> list[tuple[float, float]]:
    """The norm and the number of zeros of each step."""
    run, watcher = prepare({**values, **ASKED}), Silent()
    train(run, watcher, NoCheckpoints())
    return [(record.params_norm, record.num_zeros_in_grad) for record in watcher.records]


def plainly_logged(values: dict[str, Any]) -> list[tuple[float, float]]:
    norms, zeros = list[float](), list[float]()

    def look(step: int, optimizer: torch.optim.Optimizer) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if step:
            norms.append(float(torch.linalg.vector_norm(torch.cat([param.detach().flatten() for param in params]))))
        zeros.append(float(sum(int((param.grad == 0).sum()) for param in params)))

    weights = train_plainly(values, look).weights.values()
    norms.append(float(torch.linalg.vector_norm(torch.cat([weight.flatten() for weight in weights]))))
    return list(zip(norms, zeros, strict=True))


@pytest.mark.full(short=["units"])
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        pytest.param(3, {**UNTIED, **UNITS}, id="units"),
        pytest.param(2, {**UNTIED, **BUCKETS}, id="buckets"),
        pytest.param(2, {**UNTIED, **FSDP2}, id="fsdp2"),
        pytest.param(2, {**LLAMA, **UNITS, "tensor_model_parallel_size": 2}, id="tensor"),
        pytest.param(4, {**LLAMA, **UNITS, "pipeline_model_parallel_size": 2}, id="pipeline"),
        pytest.param(2, {**LLAMA, **FSDP2, "pipeline_model_parallel_size": 2}, id="fsdp2-pipeline"),
        pytest.param(2, {**MIXTRAL, **UNITS, "expert_model_parallel_size": 2}, id="experts"),
    ],
)
def test_every_arrangement_measures_what_one_process_has(
    run_ranks: RunRanks, ranks: int, values: dict[str, Any]
) -> None:
    of_ranks = ("use_", "data_parallel", "overlap", "tensor", "pipeline", "expert")
    plain = plainly_logged({name: value for name, value in values.items() if not name.startswith(of_ranks)})
    assert all(zeros > 0 for _, zeros in plain)  # of embeddings of tokens that do not occur
    for found in run_ranks(ranks, logged, values):
        assert [zeros for _, zeros in found] == [zeros for _, zeros in plain]
        assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in plain], rel=1e-5)
