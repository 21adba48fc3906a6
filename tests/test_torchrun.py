"""Ranks of a real torchrun, which share nothing and hash strings differently, do what one process does."""

import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError
from tests.support.case import (
    Run,
    Scenario,
    Setting,
    Tolerance,
    adamw_above_noise,
    assert_parity,
    outcome_of,
    reference,
)
from tests.support.on_ranks import assert_equal_tensors, of_ranks
from tests.support.real_torchrun import real_torchrun
from tests.support.zoo import MODEL_CASES, Block

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("up_proj", "gate_proj")


def orders_of_sets_differ(_folder: Path) -> None:
    """Or the other checks would prove nothing."""
    orders: list[Any] = [None, None]
    dist.all_gather_object(orders, list({*ATTENTION, *MLP}))
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(orders[1])


def plain_loop(folder: Path) -> None:
    scenario = Scenario(lambda run: run.train(0, 1), MODEL_CASES["transformer"], adamw_above_noise)
    setting = Setting(3, options=(("fsdp_unit_modules", {Block, nn.Embedding, "torch.nn.Linear"}),))
    run, again = Run(scenario, setting, 2), Run(scenario, setting, 2)
    scenario.script(run)
    assert_parity(of_ranks(outcome_of(run)), reference(scenario, 2), Tolerance(rtol=1e-4, atol=1e-5))
    extra = {name: nn.Linear(1, 1) for name in {*ATTENTION, *MLP}}  # in another order on the other rank
    save_checkpoint(run.model, run.optimizer, folder / "saved", iteration=2, extra=extra)
    load_checkpoint(again.model, again.optimizer, folder / "saved", extra=extra)
    assert run.sharded is not None
    assert again.sharded is not None
    assert_equal_tensors(again.sharded.full_parameters(), run.sharded.full_parameters())


def pretrained(folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel.training import assert_trained_alike, reference, strategy, train

    config = strategy("megatron_fsdp")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=config, dtype="float32")
    assert_trained_alike(train(model, steps=2), reference("llama", steps=2))


def tensor_parallel_plan(folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel.training import assert_trained_alike, reference, strategy, train

    plan = {f"model.layers.*.self_attn.{layer}": "colwise" for layer in {*ATTENTION}}
    plan |= {f"model.layers.*.mlp.{layer}": "colwise" for layer in {*MLP}}
    plan |= {"model.layers.*.self_attn.o_proj": "rowwise", "model.layers.*.mlp.down_proj": "rowwise"}
    config = strategy("fsdp2", tp_plan=plan)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=config, tp_size=2)
    assert_trained_alike(train(model, steps=2), reference("llama", steps=2))


def lora(folder: Path) -> None:
    from tests.automodel import test_adapters as adapters

    config = adapters.lora(target_modules={*ATTENTION, *MLP})
    case = ("megatron_fsdp", str(folder / "llama"), config, {}, torch.float32)
    adapters.train_adapters([case], str(folder / "lora"))


def what_differs_is_named(folder: Path) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from tests.automodel import test_adapters as adapters
    from tests.automodel.training import strategy

    config = adapters.lora(r=2 + dist.get_rank())
    with pytest.raises(ConfigurationError, match=r": peft_config\.r is 2 on rank 0, 3 on rank 1; give"):
        AutoModelForCausalLM.from_pretrained(folder / "llama", distributed_config=strategy("ddp"), peft_config=config)


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (orders_of_sets_differ, plain_loop, pretrained, tensor_parallel_plan, lora, what_differs_is_named)
}


def run_checks(folder: Path, names: list[str]) -> None:
    """Be a rank: make some checks and write what each has met, "" for nothing, to a file of this rank."""
    dist.init_process_group("gloo")
    met = {}
    for name in names:
        try:
            with warnings.catch_warnings():
                CHECKS[name](folder)
            met[name] = ""
        except Exception:  # noqa: BLE001  the test of this check raises it
            met[name] = traceback.format_exc()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(met), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def met(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What the checks have met, by rank: those that were chosen share one start."""
    folder = tmp_path_factory.mktemp("torchrun")
    chosen = [name for name in CHECKS if any(item.nodeid.endswith(f"does[{name}]") for item in request.session.items)]
    if set(chosen) - {"orders_of_sets_differ", "plain_loop"}:
        from tests.automodel import test_adapters as adapters

        Path(adapters.save("llama", folder)).rename(folder / "llama")
    real_torchrun(["-m", "tests.test_torchrun", str(folder), *chosen])
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.full(short=["plain_loop"])
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_of_torchrun_do_what_one_process_does(met: list[dict[str, str]], name: str) -> None:
    assert [of_rank[name] for of_rank in met] == ["", ""]


if __name__ == "__main__":
    run_checks(Path(sys.argv[1]), sys.argv[2:])
