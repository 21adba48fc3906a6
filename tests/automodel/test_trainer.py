"""`ShardedTrainer` beside a plain `transformers.Trainer` on one process, with the same data in the same order."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megatron_fsdp.automodel import AutoModelForCausalLM, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.process_groups import groups_destroyed
from tests.automodel.training import STRATEGIES, parameters_of, strategy
from tests.clients.test_accelerate import forget_accelerate, started
from tests.conftest import RunRanks
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed

accelerate = pytest.importorskip("accelerate")

ROWS, STEPS = 4, 3


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Token rows; of every other one some labels do not count, so that ranks have different numbers of tokens."""

    def __init__(self, count: int, uneven: bool) -> None:
        with fixed_seed(3):
            self.tokens = torch.randint(2, VOCABULARY, (count, 12))
        self.uneven = uneven

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        if self.uneven and index % 2:
            labels[:5] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def arguments(folder: str, ranks: int, **changes: Any) -> Any:
    """Two microbatches of 4 rows per step, over all ranks together."""
    return transformers.TrainingArguments(
        **{
            "output_dir": folder,
            "use_cpu": True,
            "per_device_train_batch_size": ROWS // ranks,
            "per_device_eval_batch_size": ROWS // ranks,
            "gradient_accumulation_steps": 2,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "warmup_steps": 1,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **changes,
        }
    )


def data() -> dict[str, Any]:
    return {"train_dataset": Rows(40, True), "eval_dataset": Rows(8, False), "compute_metrics": mean_label_logit}


def mean_label_logit(found: Any) -> dict[str, float]:
    """Depends on the order in which the ranks' rows are put together."""
    labels = torch.tensor(found.label_ids)
    logits = torch.tensor(found.predictions).gather(-1, labels[..., None])[..., 0]
    return {"logit": float((logits * torch.arange(1, len(labels) + 1)[:, None]).mean())}


def logged(trainer: Any) -> list[dict[str, float]]:
    """Losses and norms, without times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_logit", "step")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def one_process(folder: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    with started(False):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = transformers.Trainer(model, arguments(f"{folder}/alone-{dist.get_rank()}", 1), **data())
        trainer.train()
    return logged(trainer), {name: param.detach().clone() for name, param in model.named_parameters()}


def load(folder: str, name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy(name), dtype=torch.float32)


def assert_same_log(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected), (found, expected)
    for own, other in zip(found, expected, strict=True):
        assert own.keys() == other.keys(), (own, other)
        for key, value in other.items():
            torch.testing.assert_close(own[key], value, rtol=1e-4, atol=1e-5, msg=f"{key}: {own} and {other}")


def _train_resume_and_save(folder: str, name: str) -> None:
    from megatron_fsdp.automodel.trainer import ShardedTrainer

    ranks = dist.get_world_size()
    expected, expected_weights = one_process(folder)
    forget_accelerate()
    out = f"{folder}/{name}"
    trainer = ShardedTrainer(load(folder, name), arguments(out, ranks, save_strategy="steps", save_steps=2), **data())
    trainer.train()
    assert_same_log(logged(trainer), expected)
    trained = parameters_of(trainer.model_wrapped)
    assert_equal_tensors(trained, expected_weights, 2e-4, 2e-4)
    trainer.save_model()
    trainer.save_model()  # in place of the first
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_equal_tensors(dict(again.named_parameters()), trained)

    forget_accelerate()
    second = ShardedTrainer(load(folder, name), arguments(out, ranks), **data())
    second.train(resume_from_checkpoint=f"{out}/checkpoint-2")
    assert_same_log(logged(second), expected)
    assert_equal_tensors(parameters_of(second.model_wrapped), trained)
    dist.barrier()


def under_torchrun(worker: Callable[..., None], *args: Any) -> None:
    """Run a worker in the environment that torchrun makes."""
    with groups_destroyed(), started(True):
        worker(*args)


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_one_process_and_goes_on_where_it_stopped(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "model"
    build("llama_tied").save_pretrained(folder)
    run_ranks(2, under_torchrun, _train_resume_and_save, str(folder), name, timeout_s=300.0)


def _train_adapters_and_take_the_best(folder: str, names: Sequence[str]) -> None:
    import peft

    from megatron_fsdp.automodel.trainer import ShardedTrainer
    from tests.automodel.test_adapters import _Quiet, lora, with_adapters

    ranks, rank = dist.get_world_size(), dist.get_rank()
    best = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "load_best_model_at_end": True}
    with started(False), _Quiet():
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        trainer = transformers.Trainer(
            with_adapters(base, lora()), arguments(f"{folder}/alone-{rank}", 1, **best), **data()
        )
        trainer.train()
    expected = {name: param.detach() for name, param in trainer.model.named_parameters()}
    for name in names:
        forget_accelerate()
        with _Quiet():
            torch.manual_seed(5)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=strategy(name), dtype=torch.float32, peft_config=lora()
            )
            own = ShardedTrainer(model, arguments(f"{folder}/{name}", ranks, **best), **data())
            own.train()
        assert_same_log(logged(own), logged(trainer))
        assert own.state.best_global_step == trainer.state.best_global_step
        assert_equal_tensors(parameters_of(model), expected, 2e-4, 2e-4)
        with _Quiet():
            base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            peft.PeftModel.from_pretrained(base, f"{folder}/{name}/checkpoint-1")
        dist.barrier()


@pytest.mark.full
def test_adapters_are_trained_and_the_best_are_taken(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    build("llama").save_pretrained(tmp_path / "model")
    run_ranks(
        2, under_torchrun, _train_adapters_and_take_the_best, str(tmp_path / "model"), STRATEGIES, timeout_s=300.0
    )


def _refuse(folder: str) -> None:
    from megatron_fsdp.automodel.trainer import ShardedTrainer

    forget_accelerate()
    model = load(folder, "ddp")
    for name, value in [
        ("bf16", True),
        ("bf16_full_eval", True),
        ("activation_checkpointing", True),
        ("fsdp", "full_shard"),
        ("optim", "adafactor"),
        ("ddp_bucket_cap_mb", 25),
        ("auto_find_batch_size", True),
        ("label_smoothing_factor", 0.1),
    ]:
        forget_accelerate()
        with pytest.raises(ConfigurationError, match=name):
            ShardedTrainer(model, arguments(f"{folder}/out", 2, **{name: value}), **data())
    forget_accelerate()
    plain = arguments(f"{folder}/out", 2)
    with pytest.raises(ConfigurationError, match="mesh_context"):
        ShardedTrainer(build("llama"), plain, **data())
    with pytest.raises(ConfigurationError, match="model_init"):
        ShardedTrainer(model, plain, model_init=lambda: model, **data())
    divided = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=FSDP2Config(backend="gloo"), tp_size=2, dtype=torch.float32
    )
    with pytest.raises(ConfigurationError, match="tp_size"):
        ShardedTrainer(divided, plain, **data())
    summed = MegatronFSDPConfig(backend="gloo", calculate_per_token_loss=True)
    with pytest.raises(ConfigurationError, match="calculate_per_token_loss"):
        ShardedTrainer(AutoModelForCausalLM.from_pretrained(folder, distributed_config=summed), plain, **data())
    trainer = ShardedTrainer(model, plain, **data())
    with pytest.raises(ConfigurationError, match="training_state"):
        trainer.train(resume_from_checkpoint=folder)


def test_what_cannot_be_honoured_is_refused_in_words(run_ranks: RunRanks, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    run_ranks(2, under_torchrun, _refuse, str(tmp_path / "model"))
